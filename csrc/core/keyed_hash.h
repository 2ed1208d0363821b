// HMAC-SHA256 (RFC 2104, FIPS 180-4): a hash that only who has the key can
// make. Torch-free; objects do not change once made, so threads may share them.
//
// The control plane's threads work without Python, whose `hmac` is the oracle
// of the tests (tests/core/test_keyed_hash.py); no library with this hash is at
// hand wherever torch is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace pipetransformer::core {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void update(std::string_view bytes) noexcept;
  // Of all bytes so far; call once.
  Digest finish() noexcept;

 private:
  void take_block(const uint8_t* block) noexcept;

  std::array<uint32_t, 8> state_{
      0x6a09e667,
      0xbb67ae85,
      0x3c6ef372,
      0xa54ff53a,
      0x510e527f,
      0x9b05688c,
      0x1f83d9ab,
      0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  size_t filled_ = 0;
  uint64_t size_ = 0;
};

class KeyedHash {
 public:
  // Any number of bytes; more than 64 are hashed first, as HMAC has it.
  explicit KeyedHash(std::string_view key);

  // Of `parts` one after the other. Where a part ends is not in it: the caller
  // sees to it that no two lists of parts give the same bytes.
  Digest
  operator()(std::initializer_list<std::string_view> parts) const noexcept;

 private:
  Sha256 inner_;
  Sha256 outer_;
};

// In a time that does not depend on what the bytes are.
bool same_bytes(std::string_view a, std::string_view b) noexcept;

inline std::string_view as_text(const Digest& digest) noexcept {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace pipetransformer::core
