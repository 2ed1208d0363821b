// A store whose values only the ranks of one run can write, though others reach
// the same server.
//
// Each value is stored behind a keyed hash of its key and of itself, and each
// key under a keyed hash of its name. A value whose seal does not fit counts as
// a key that is not there: it is never handed on, is overwritten by whoever
// writes the key, and is counted. So who does not have the secret can neither
// make nor move a message; it can remove those it finds (docs/protocol.md,
// Trust). add() alone is a number of the server's own: its key is hidden, its
// value is not sealed.
//
// Thread-safe as the store below it is.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/keyed_hash.h"

namespace pipetransformer::autodp {

// What of a store's messages was no rank's.
struct Refusals {
  int64_t count = 0;  // values; one that is read again counts once
  std::string first;  // the key of the first one
};

class Seal {
 public:
  using Bytes = std::vector<uint8_t>;

  explicit Seal(std::string_view secret);

  std::string hidden(const std::string& key) const;
  Bytes close(const std::string& key, const Bytes& value) const;
  // Nullopt, and noted, if `sealed` is no value that a rank wrote at `key`.
  std::optional<Bytes> open(const std::string& key, const Bytes& sealed);

  Refusals refusals() const;

 private:
  core::Digest of(const std::string& key, std::string_view value) const;

  const core::KeyedHash names_;
  const core::KeyedHash values_;
  mutable std::mutex mutex_;
  Refusals refusals_;
  std::map<std::string, uint64_t> refused_;  // hash of the last one, by key
};

class SealedStore : public c10d::Store {
 public:
  SealedStore(
      c10::intrusive_ptr<c10d::Store> inner,
      std::shared_ptr<Seal> seal);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  using c10d::Store::compareSet;
  std::vector<uint8_t> compareSet(
      const std::string& key,
      const std::vector<uint8_t>& expected,
      const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(
      const std::vector<std::string>& keys,
      const std::chrono::milliseconds& timeout) override;

 private:
  std::optional<std::vector<uint8_t>> read(const std::string& key);

  c10::intrusive_ptr<c10d::Store> inner_;
  std::shared_ptr<Seal> seal_;
};

}  // namespace pipetransformer::autodp
