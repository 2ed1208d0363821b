#include "autodp/store/sealed_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "autodp/store/patient_store.h"
#include "core/hash.h"

namespace pipetransformer::autodp {

namespace {

using Bytes = std::vector<uint8_t>;

// How often a write meets another foreign value than the one it saw.
constexpr int kMostRivals = 1000;
// Keys whose last foreign value is remembered; those beyond count each time.
constexpr size_t kMostRemembered = 1024;
// No seal fits it, and no key holds it.
const Bytes kAbsentBytes{'\x01', 'a', 'b', 's', 'e', 'n', 't'};

std::string_view as_text(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

core::KeyedHash derived(std::string_view secret, std::string_view purpose) {
  const auto key = core::KeyedHash(secret)({"pipetransformer ", purpose});
  return core::KeyedHash(core::as_text(key));
}

}  // namespace

Seal::Seal(std::string_view secret)
    : names_(derived(secret, "names")), values_(derived(secret, "values")) {}

std::string Seal::hidden(const std::string& key) const {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string name = "pt/";
  for (const uint8_t byte : names_({key})) {
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  return name;
}

core::Digest Seal::of(const std::string& key, std::string_view value) const {
  // The length keeps apart what belongs to the key and to the value.
  return values_({std::to_string(key.size()), ":", key, value});
}

Bytes Seal::close(const std::string& key, const Bytes& value) const {
  const auto digest = of(key, as_text(value));
  Bytes sealed(digest.size() + value.size());
  const auto rest = std::copy(digest.begin(), digest.end(), sealed.begin());
  std::copy(value.begin(), value.end(), rest);
  return sealed;
}

std::optional<Bytes> Seal::open(const std::string& key, const Bytes& sealed) {
  constexpr size_t kSize = std::tuple_size_v<core::Digest>;
  const auto text = as_text(sealed);
  if (sealed.size() >= kSize) {
    const auto digest = of(key, text.substr(kSize));
    if (core::same_bytes(core::as_text(digest), text.substr(0, kSize))) {
      return Bytes(sealed.begin() + kSize, sealed.end());
    }
  }
  const auto hash = core::hash_string(text);
  const std::lock_guard lock(mutex_);
  const auto known = refused_.find(key);
  if (known != refused_.end() && known->second == hash) {
    return std::nullopt;
  }
  if (known != refused_.end()) {
    known->second = hash;
  } else if (refused_.size() < kMostRemembered) {
    refused_.emplace(key, hash);
  }
  if (refusals_.count++ == 0) {
    refusals_.first = key;
  }
  return std::nullopt;
}

Refusals Seal::refusals() const {
  const std::lock_guard lock(mutex_);
  return refusals_;
}

SealedStore::SealedStore(
    c10::intrusive_ptr<c10d::Store> inner,
    std::shared_ptr<Seal> seal)
    : c10d::Store(inner->getTimeout()),
      inner_(std::move(inner)),
      seal_(std::move(seal)) {}

c10::intrusive_ptr<c10d::Store> SealedStore::clone() {
  return c10::make_intrusive<SealedStore>(inner_->clone(), seal_);
}

void SealedStore::set(const std::string& key, const Bytes& value) {
  inner_->set(seal_->hidden(key), seal_->close(key, value));
}

Bytes SealedStore::compareSet(
    const std::string& key,
    const Bytes& expected,
    const Bytes& desired) {
  if (!expected.empty() && expected == desired) {
    // Writes nothing, whatever is there: so nothing is sealed for it that an
    // onlooker could keep and put there.
    return read(key).value_or(expected);
  }
  const auto name = seal_->hidden(key);
  const auto sealed = seal_->close(key, desired);
  auto replaced = expected.empty() ? Bytes() : seal_->close(key, expected);
  for (int i = 0; i < kMostRivals; ++i) {
    auto current = inner_->compareSet(name, replaced, sealed);
    if (auto value = seal_->open(key, current)) {
      return std::move(*value);
    }
    if (!expected.empty()) {
      return expected;  // as for a key that is not there
    }
    replaced = std::move(current);  // ours takes the place of a foreign value
  }
  C10_THROW_ERROR(
      DistStoreError,
      "store: expected to write '" + key +
          "', got foreign values there as fast as they were replaced");
}

std::optional<Bytes> SealedStore::read(const std::string& key) {
  const auto found =
      inner_->compareSet(seal_->hidden(key), kAbsentBytes, kAbsentBytes);
  return found == kAbsentBytes ? std::nullopt : seal_->open(key, found);
}

Bytes SealedStore::get(const std::string& key) {
  wait({key});
  auto value = read(key);
  TORCH_CHECK(value.has_value(), key, ": expected a key that stays, got none");
  return std::move(*value);
}

int64_t SealedStore::add(const std::string& key, int64_t value) {
  return inner_->add(seal_->hidden(key), value);
}

bool SealedStore::deleteKey(const std::string& key) {
  return inner_->deleteKey(seal_->hidden(key));
}

bool SealedStore::check(const std::vector<std::string>& keys) {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const auto& key : keys) {
    names.push_back(seal_->hidden(key));
  }
  return inner_->check(names) &&
         std::all_of(keys.begin(), keys.end(), [this](const std::string& key) {
           return read(key).has_value();
         });
}

int64_t SealedStore::getNumKeys() {
  return inner_->getNumKeys();
}

void SealedStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}

void SealedStore::wait(
    const std::vector<std::string>& keys,
    const std::chrono::milliseconds& timeout) {
  wait_by_looking(*this, keys, timeout);
}

}  // namespace pipetransformer::autodp
