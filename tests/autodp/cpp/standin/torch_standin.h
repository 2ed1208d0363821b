// What csrc/autodp uses of torch, in plain C++: stores, works, futures,
// backends.
//
// For sanitizers: torch's own libraries are not built with them, so that half
// of what goes on between threads would be unseen. Names and promises are
// torch's (2.13); what nobody here uses is missing. A tensor is one number in
// plain memory: who reads it without being told that it is there is a data
// race.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace c10 {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  const char* what_without_backtrace() const {
    return what();
  }
};
using DistStoreError = Error;

template <typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
  }
}
#define TORCH_CHECK(condition, ...) \
  ::c10::check(static_cast<bool>(condition), __VA_ARGS__)
#define TORCH_WARN(...) static_cast<void>(0)
#define C10_THROW_ERROR(kind, text) throw ::c10::kind(text)

template <typename T>
class intrusive_ptr : public std::shared_ptr<T> {
 public:
  using std::shared_ptr<T>::shared_ptr;
  intrusive_ptr(std::shared_ptr<T>&& object)
      : std::shared_ptr<T>(std::move(object)) {}
  // The object then lives for ever.
  T* release() {
    return (new intrusive_ptr(std::move(*this)))->get();
  }
};

template <typename T, typename... Arguments>
intrusive_ptr<T> make_intrusive(Arguments&&... arguments) {
  return std::make_shared<T>(std::forward<Arguments>(arguments)...);
}

enum class DeviceType { CPU, CUDA };

class DistError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  const char* what_without_backtrace() const noexcept {
    return what();
  }
};

}  // namespace c10

namespace at {

class Tensor {
 public:
  explicit Tensor(int64_t value = 0)
      : value_(std::make_shared<int64_t>(value)) {}
  int64_t& item() const {
    return *value_;
  }
  const Tensor& copy_(const Tensor& other) const {
    item() = other.item();
    return *this;
  }
  const Tensor& view_as(const Tensor&) const {
    return *this;
  }

 private:
  std::shared_ptr<int64_t> value_;
};

}  // namespace at

namespace c10 {

struct TensorType {
  static int get() {
    return 0;
  }
};
struct ListType {
  static int create(int element) {
    return element;
  }
};

class IValue {
 public:
  IValue() = default;
  IValue(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}

 private:
  std::vector<at::Tensor> tensors_;
};

namespace ivalue {

class Future {
 public:
  using Nothing = std::vector<int>;  // storages and devices
  explicit Future(int /*type*/, const Nothing& /*devices*/ = {}) {}

  void markCompleted(IValue value, const Nothing& /*storages*/ = {}) {
    complete([&] { value_ = std::move(value); });
  }
  void setError(std::exception_ptr error) {
    complete([&] { error_ = std::move(error); });
  }
  bool hasError() const {
    const std::lock_guard lock(mutex_);
    return error_ != nullptr;
  }
  IValue value() const {
    const std::lock_guard lock(mutex_);
    return value_;
  }
  Nothing storages() const {
    return {};
  }
  Nothing devices() const {
    return {};
  }
  std::string tryRetrieveErrorMessage() const {
    const std::lock_guard lock(mutex_);
    try {
      std::rethrow_exception(error_);
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  void addCallback(std::function<void(Future&)> callback) {
    std::unique_lock lock(mutex_);
    if (!completed_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
    lock.unlock();
    callback(*this);
  }

 private:
  void complete(const std::function<void()>& set) {
    std::vector<std::function<void(Future&)>> callbacks;
    {
      const std::lock_guard lock(mutex_);
      check(!completed_, "future: completed twice");
      completed_ = true;
      set();
      callbacks.swap(callbacks_);
    }
    for (auto& callback : callbacks) {
      callback(*this);
    }
  }

  mutable std::mutex mutex_;
  bool completed_ = false;
  IValue value_;
  std::exception_ptr error_;
  std::vector<std::function<void(Future&)>> callbacks_;
};

}  // namespace ivalue
}  // namespace c10

namespace c10d {

using Milliseconds = std::chrono::milliseconds;
inline constexpr Milliseconds kUnsetTimeout{-1};

class Store {
 public:
  static constexpr Milliseconds kNoTimeout{0};
  Store() = default;
  explicit Store(const Milliseconds& timeout) : timeout_(timeout) {}
  virtual ~Store() = default;

  virtual c10::intrusive_ptr<Store> clone() = 0;
  void set(const std::string& key, const std::string& value) {
    set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  virtual void
  set(const std::string& key, const std::vector<uint8_t>& value) = 0;
  std::string compareSet(
      const std::string& key,
      const std::string& expected,
      const std::string& desired) {
    const auto held = compareSet(
        key,
        std::vector<uint8_t>(expected.begin(), expected.end()),
        std::vector<uint8_t>(desired.begin(), desired.end()));
    return {held.begin(), held.end()};
  }
  virtual std::vector<uint8_t> compareSet(
      const std::string& key,
      const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) = 0;
  virtual std::vector<uint8_t> get(const std::string& key) = 0;
  virtual int64_t add(const std::string& key, int64_t value) = 0;
  virtual bool deleteKey(const std::string& key) = 0;
  virtual bool check(const std::vector<std::string>& keys) = 0;
  virtual int64_t getNumKeys() = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void
  wait(const std::vector<std::string>& keys, const Milliseconds& timeout) = 0;

 protected:
  Milliseconds timeout_{0};
};

enum class OpType { BROADCAST, ALLREDUCE, ALLGATHER, _ALLGATHER_BASE, BARRIER };

class Work {
 public:
  explicit Work(int /*rank*/ = -1, OpType /*type*/ = OpType::BARRIER) {}
  virtual ~Work() = default;
  virtual bool isCompleted() {
    const std::lock_guard lock(mutex_);
    return completed_;
  }
  virtual bool wait(Milliseconds /*timeout*/ = Milliseconds(0)) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return completed_; });
    if (exception_) {
      std::rethrow_exception(exception_);
    }
    return true;
  }
  virtual void synchronize() {}
  virtual std::exception_ptr exception() const {
    const std::lock_guard lock(mutex_);
    return exception_;
  }
  virtual std::vector<at::Tensor> result() {
    return {};
  }
  virtual c10::intrusive_ptr<c10::ivalue::Future> getFuture() = 0;
  static c10::intrusive_ptr<Work>
  create_from_future(const c10::intrusive_ptr<c10::ivalue::Future>& future);

 protected:
  void finish(std::exception_ptr exception = nullptr) {
    {
      const std::lock_guard lock(mutex_);
      completed_ = true;
      exception_ = std::move(exception);
    }
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool completed_ = false;
  std::exception_ptr exception_;
};

class FutureWork : public Work {
 public:
  explicit FutureWork(c10::intrusive_ptr<c10::ivalue::Future> future)
      : future_(std::move(future)) {
    finish();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

inline c10::intrusive_ptr<Work> Work::create_from_future(
    const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  return c10::make_intrusive<FutureWork>(future);
}

struct AnyOptions {
  Milliseconds timeout = kUnsetTimeout;
};
struct BroadcastOptions : AnyOptions {};
struct AllreduceOptions : AnyOptions {};
struct AllgatherOptions : AnyOptions {};
struct BarrierOptions : AnyOptions {};

class Backend {
 public:
  Backend(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Backend() = default;
  int getRank() const {
    return rank_;
  }
  int getSize() const {
    return size_;
  }
  virtual const std::string getBackendName() const = 0;
  virtual void setTimeout(Milliseconds timeout) = 0;
  virtual c10::intrusive_ptr<Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const BroadcastOptions& options) = 0;
  virtual c10::intrusive_ptr<Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const AllreduceOptions& options) = 0;
  virtual c10::intrusive_ptr<Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const AllgatherOptions& options) = 0;
  virtual c10::intrusive_ptr<Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const AllgatherOptions& options) = 0;
  virtual c10::intrusive_ptr<Work> barrier(const BarrierOptions& options) = 0;
  virtual void abort() {}

 private:
  int rank_;
  int size_;
};

class ProcessGroup {
 public:
  enum class BackendType { NCCL, CUSTOM };
  ProcessGroup(const c10::intrusive_ptr<Store>& store, int rank, int size)
      : store_(store), rank_(rank), size_(size) {}
  void setBackend(
      c10::DeviceType /*device*/,
      BackendType type,
      const c10::intrusive_ptr<Backend>& backend) {
    (type == BackendType::CUSTOM ? backend_ : on_device_) = backend;
  }
  void setDefaultBackend(BackendType /*type*/) {}
  const c10::intrusive_ptr<Backend>& getDefaultBackend() const {
    return backend_;
  }
  const c10::intrusive_ptr<Backend>& getBackend(c10::DeviceType type) const {
    return type == c10::DeviceType::CPU ? backend_ : on_device_;
  }

 private:
  c10::intrusive_ptr<Store> store_;
  int rank_;
  int size_;
  c10::intrusive_ptr<Backend> backend_;
  c10::intrusive_ptr<Backend> on_device_;
};

}  // namespace c10d
