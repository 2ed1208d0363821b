// A store in this process that may be killed or stopped, as a server of torch's
// is.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "torch_standin.h"

namespace standin {

class MemoryStore : public c10d::Store {
 public:
  enum class Server { kServes, kDead, kStopped };

  MemoryStore() : content_(std::make_shared<Content>()) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<MemoryStore>(*this);
  }
  // Operations that a stopped server keeps waiting go on once it is another.
  void turn(Server server) {
    {
      const std::lock_guard lock(content_->mutex);
      content_->server = server;
    }
    content_->changed.notify_all();
  }

  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    const auto lock = served();
    content_->keys[key] = value;
  }
  using c10d::Store::compareSet;
  std::vector<uint8_t> compareSet(
      const std::string& key,
      const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) override {
    const auto lock = served();
    const auto found = content_->keys.find(key);
    if (found == content_->keys.end() && !expected.empty()) {
      return expected;
    }
    auto& held = content_->keys[key];
    if (held == expected) {
      held = desired;
    }
    return held;
  }
  std::vector<uint8_t> get(const std::string& key) override {
    const auto lock = served();
    const auto found = content_->keys.find(key);
    TORCH_CHECK(found != content_->keys.end(), "no key ", key);
    return found->second;
  }
  int64_t add(const std::string& key, int64_t value) override {
    const auto lock = served();
    return content_->counts[key] += value;
  }
  bool deleteKey(const std::string& key) override {
    const auto lock = served();
    return content_->keys.erase(key) > 0;
  }
  bool check(const std::vector<std::string>& keys) override {
    const auto lock = served();
    for (const auto& key : keys) {
      if (content_->keys.count(key) == 0) {
        return false;
      }
    }
    return true;
  }
  int64_t getNumKeys() override {
    const auto lock = served();
    return static_cast<int64_t>(content_->keys.size());
  }
  void wait(const std::vector<std::string>& keys) override {
    TORCH_CHECK(check(keys), "a wait that blocks");
  }
  void wait(
      const std::vector<std::string>& keys,
      const c10d::Milliseconds& /*timeout*/) override {
    wait(keys);
  }

 private:
  struct Content {
    std::mutex mutex;
    std::condition_variable changed;
    Server server = Server::kServes;
    std::map<std::string, std::vector<uint8_t>> keys;
    std::map<std::string, int64_t> counts;
  };

  std::unique_lock<std::mutex> served() const {
    std::unique_lock lock(content_->mutex);
    content_->changed.wait(
        lock, [this] { return content_->server != Server::kStopped; });
    if (content_->server == Server::kDead) {
      C10_THROW_ERROR(DistStoreError, "broken pipe");
    }
    return lock;
  }

  std::shared_ptr<Content> content_;
};

}  // namespace standin
