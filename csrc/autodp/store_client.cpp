#include "autodp/store_client.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace pipetransformer::autodp {

namespace {

// How long a waiter sleeps between two looks at the store. The first looks come
// quickly (answers within a transformation), later ones rarely (standbys).
constexpr std::chrono::microseconds kFirstPause{500};
constexpr std::chrono::microseconds kLongestPause{20000};
constexpr std::chrono::milliseconds kFailureCheck{20};

std::string first_line(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error != nullptr
                               ? torch_error->what_without_backtrace()
                               : error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

Failure store_failure(int store_rank, const std::exception& error) {
  Failure failure;
  failure.rank = store_rank;
  failure.phase = "store";
  failure.reason = "the store is lost: " + first_line(error);
  return failure;
}

std::optional<std::string>
read_key(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) {
    return std::nullopt;
  }
  const auto value = store.get(key);
  return std::string(value.begin(), value.end());
}

StoreClient::StoreClient(
    const c10::intrusive_ptr<c10d::Store>& store,
    std::shared_ptr<FailureLatch> latch,
    int store_rank)
    : store_(store->clone()),
      latch_(std::move(latch)),
      store_rank_(store_rank),
      thread_("pt-store") {}

template <typename Result>
Result StoreClient::run(std::function<Result(c10d::Store&)> operation) {
  latch_->check();
  // The task owns its store: it may outlive this object (abandoned thread).
  auto task = std::make_shared<std::packaged_task<Result()>>(
      [store = store_, operation = std::move(operation)] {
        return operation(*store);
      });
  auto result = task->get_future();
  TORCH_CHECK(
      thread_.post([task] { (*task)(); }),
      "message plane: expected an open plane, got a closed one");
  while (result.wait_for(kFailureCheck) != std::future_status::ready) {
    latch_->check();
  }
  try {
    return result.get();
  } catch (const std::exception& error) {
    latch_->fail(store_failure(store_rank_, error));
    latch_->check();
    throw;
  }
}

void StoreClient::set(const std::string& key, const std::string& value) {
  run<void>([key, value](c10d::Store& store) { store.set(key, value); });
}

std::optional<std::string> StoreClient::read(const std::string& key) {
  return run<std::optional<std::string>>(
      [key](c10d::Store& store) { return read_key(store, key); });
}

std::string StoreClient::compare_set(
    const std::string& key,
    const std::string& expected,
    const std::string& desired) {
  return run<std::string>([key, expected, desired](c10d::Store& store) {
    return store.compareSet(key, expected, desired);
  });
}

void StoreClient::remove(const std::vector<std::string>& keys) {
  run<void>([keys](c10d::Store& store) {
    for (const auto& key : keys) {
      store.deleteKey(key);
    }
  });
}

void StoreClient::remove_later(std::vector<std::string> keys) {
  // False after stop(): the keys stay until the run's store goes.
  static_cast<void>(thread_.post([store = store_,
                                  latch = latch_,
                                  rank = store_rank_,
                                  keys = std::move(keys)] {
    if (latch->failed()) {
      return;
    }
    try {
      for (const auto& key : keys) {
        store->deleteKey(key);
      }
    } catch (const std::exception& error) {
      latch->fail(store_failure(rank, error));
    }
  }));
}

int StoreClient::wait_any(
    const std::vector<std::vector<std::string>>& groups,
    std::chrono::milliseconds slice) {
  const auto end = std::chrono::steady_clock::now() + slice;
  auto pause = kFirstPause;
  while (true) {
    const int found = run<int>([groups](c10d::Store& store) {
      for (size_t i = 0; i < groups.size(); ++i) {
        if (store.check(groups[i])) {
          return static_cast<int>(i);
        }
      }
      return -1;
    });
    if (found >= 0 || std::chrono::steady_clock::now() + pause > end) {
      return found;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

bool StoreClient::stop(std::chrono::milliseconds deadline) noexcept {
  return thread_.stop(deadline);
}

}  // namespace pipetransformer::autodp
