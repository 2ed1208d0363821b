#include "autodp/store/patient_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

namespace pipetransformer::autodp {

namespace {

// Peers connect within milliseconds: looks come quickly.
constexpr std::chrono::microseconds kFirstPeerPause{100};
constexpr std::chrono::microseconds kLongestPeerPause{2000};

}  // namespace

PatientStore::PatientStore(
    std::shared_ptr<StoreClient> client,
    std::shared_ptr<FailureLatch> latch,
    std::chrono::milliseconds timeout)
    : c10d::Store(timeout),
      client_(std::move(client)),
      latch_(std::move(latch)) {}

// The result is shared with the operation, which may outlive this call.
template <typename Operation>
auto PatientStore::run(Operation operation) {
  using Result = std::invoke_result_t<Operation, c10d::Store&>;
  auto result = std::make_shared<std::optional<Result>>();
  client_->run_with(
      latch_, [result, operation = std::move(operation)](c10d::Store& store) {
        *result = operation(store);
      });
  return std::move(**result);
}

c10::intrusive_ptr<c10d::Store> PatientStore::clone() {
  return c10::make_intrusive<PatientStore>(client_, latch_, timeout_);
}

void PatientStore::set(
    const std::string& key,
    const std::vector<uint8_t>& value) {
  run([key, value](c10d::Store& store) {
    store.set(key, value);
    return true;
  });
}

std::vector<uint8_t> PatientStore::compareSet(
    const std::string& key,
    const std::vector<uint8_t>& expected,
    const std::vector<uint8_t>& desired) {
  return run([key, expected, desired](c10d::Store& store) {
    return store.compareSet(key, expected, desired);
  });
}

std::vector<uint8_t> PatientStore::get(const std::string& key) {
  wait({key});
  const auto value =
      run([key](c10d::Store& store) { return read_key(store, key); });
  TORCH_CHECK(value.has_value(), key, ": expected a key that stays, got none");
  return {value->begin(), value->end()};
}

int64_t PatientStore::add(const std::string& key, int64_t value) {
  return run(
      [key, value](c10d::Store& store) { return store.add(key, value); });
}

bool PatientStore::deleteKey(const std::string& key) {
  return run([key](c10d::Store& store) { return store.deleteKey(key); });
}

bool PatientStore::check(const std::vector<std::string>& keys) {
  return run([keys](c10d::Store& store) { return store.check(keys); });
}

int64_t PatientStore::getNumKeys() {
  return run([](c10d::Store& store) { return store.getNumKeys(); });
}

void PatientStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void PatientStore::wait(
    const std::vector<std::string>& keys,
    const std::chrono::milliseconds& timeout) {
  wait_by_looking(*this, keys, timeout);
}

void wait_by_looking(
    c10d::Store& store,
    const std::vector<std::string>& keys,
    std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  auto pause = kFirstPeerPause;
  while (!store.check(keys)) {
    if (timeout != c10d::Store::kNoTimeout &&
        std::chrono::steady_clock::now() >= end) {
      C10_THROW_ERROR(
          DistStoreError,
          "store: expected '" + keys.front() + "' within " +
              std::to_string(timeout.count()) + " ms, got nothing");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPeerPause);
  }
}

}  // namespace pipetransformer::autodp
