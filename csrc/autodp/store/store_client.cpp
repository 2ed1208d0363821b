#include "autodp/store/store_client.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "core/plain_text.h"

namespace pipetransformer::autodp {

namespace {

// How long a waiter sleeps between two looks at the store. The first looks come
// quickly (answers within a transformation), later ones rarely (standbys).
constexpr std::chrono::microseconds kFirstPause{500};
constexpr std::chrono::microseconds kLongestPause{20000};
constexpr std::chrono::milliseconds kFailureCheck{20};
// No key of ours ever holds these bytes.
constexpr char kAbsent[] = "\x01 absent";

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
  failure.reason = "the store is lost: " + core::plain_text(first_line(error));
  return failure;
}

// A `get` waits for a key that is not there, and so would one of a key that is
// deleted just after a `check`. compare_set never waits: it returns what an
// existing key holds, and its expectation for an absent one.
std::optional<std::string>
read_key(c10d::Store& store, const std::string& key) {
  auto value = store.compareSet(key, kAbsent, kAbsent);
  if (value == kAbsent) {
    return std::nullopt;
  }
  return value;
}

StoreClient::StoreClient(
    c10::intrusive_ptr<c10d::Store> store,
    std::shared_ptr<RunState> run,
    int store_rank)
    : store_(std::move(store)),
      run_(std::move(run)),
      store_rank_(store_rank),
      thread_("pt-store") {}

void StoreClient::check(const std::shared_ptr<FailureLatch>& latch) const {
  if (latch) {
    latch->check();
  }
  if (const auto loss = run_->store_loss()) {
    throw PeerFailureError(*loss);
  }
}

template <typename Result>
Result StoreClient::run(
    const std::shared_ptr<FailureLatch>& latch,
    std::function<Result(c10d::Store&)> operation) {
  check(latch);
  // The task owns its store: it may outlive this object (abandoned thread).
  auto task = std::make_shared<std::packaged_task<Result()>>(
      [store = store_, operation = std::move(operation)] {
        return operation(*store);
      });
  auto result = task->get_future();
  TORCH_CHECK(
      thread_.post([task] { (*task)(); }),
      "control plane: expected an open plane, got a closed one");
  ++num_operations_;
  while (result.wait_for(kFailureCheck) != std::future_status::ready) {
    check(latch);
  }
  try {
    return result.get();
  } catch (const PeerFailureError&) {
    throw;
  } catch (const std::exception& error) {
    run_->lose_store(store_failure(store_rank_, error));
    check(latch);
    throw;
  }
}

template <typename Result>
Result StoreClient::write(std::function<Result(c10d::Store&)> operation) {
  const auto generation = run_->generation();
  if (!run_->survives()) {
    return run<Result>(generation->latch, std::move(operation));
  }
  return run<Result>(
      generation->latch,
      [generation, operation = std::move(operation)](c10d::Store& store) {
        if (const auto abort = read_key(store, generation->key("abort"))) {
          generation->latch->fail(decode(*abort));
        }
        generation->latch->check();
        return operation(store);
      });
}

void StoreClient::set(const std::string& key, const std::string& value) {
  write<void>([key, value](c10d::Store& store) { store.set(key, value); });
}

std::optional<std::string> StoreClient::read(const std::string& key) {
  return run<std::optional<std::string>>(
      run_->generation()->latch,
      [key](c10d::Store& store) { return read_key(store, key); });
}

std::string StoreClient::compare_set(
    const std::string& key,
    const std::string& expected,
    const std::string& desired) {
  return write<std::string>([key, expected, desired](c10d::Store& store) {
    return store.compareSet(key, expected, desired);
  });
}

void StoreClient::remove(const std::vector<std::string>& keys) {
  write<void>([keys](c10d::Store& store) {
    for (const auto& key : keys) {
      store.deleteKey(key);
    }
  });
}

void StoreClient::remove_later(std::vector<std::string> keys) {
  // False after stop(): the keys stay until the run's store goes.
  const bool posted = thread_.post([store = store_,
                                    run = run_,
                                    latch = run_->generation()->latch,
                                    rank = store_rank_,
                                    keys = std::move(keys)] {
    if (latch->failed() || run->store_loss().has_value()) {
      return;
    }
    try {
      for (const auto& key : keys) {
        store->deleteKey(key);
      }
    } catch (const std::exception& error) {
      run->lose_store(store_failure(rank, error));
    }
  });
  num_operations_ += posted ? 1 : 0;
}

void StoreClient::run_with(
    const std::shared_ptr<FailureLatch>& latch,
    const std::function<void(c10d::Store&)>& operation) {
  run<void>(latch, operation);
}

int StoreClient::wait_any(
    const std::vector<std::vector<std::string>>& groups,
    std::chrono::milliseconds slice) {
  const auto end = std::chrono::steady_clock::now() + slice;
  const auto latch = run_->generation()->latch;
  auto pause = kFirstPause;
  while (true) {
    const int found = run<int>(latch, [groups](c10d::Store& store) {
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
