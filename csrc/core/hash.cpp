#include "core/hash.h"

#include <array>
#include <cstring>

namespace pipetransformer::core {

namespace {

constexpr uint64_t kPrime = 0x9fb21c651e98df25ULL;

// Moves every input bit towards every output bit (the finalizer of MurmurHash3,
// constants by David Stafford, variant 13; public domain).
uint64_t mix(uint64_t x) noexcept {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  x ^= x >> 31;
  return x;
}

uint64_t load_word(const unsigned char* p) noexcept {
  uint64_t word = 0;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

uint64_t step(uint64_t lane, uint64_t word) noexcept {
  lane = (lane ^ word) * kPrime;
  return lane ^ (lane >> 29);
}

}  // namespace

uint64_t
hash_bytes(const void* data, std::size_t size, uint64_t seed) noexcept {
  const auto* p = static_cast<const unsigned char*>(data);
  std::size_t left = size;
  // Four independent lanes hide the latency of the multiplication.
  std::array<uint64_t, 4> lane{
      mix(seed), mix(seed + 1), mix(seed + 2), mix(seed + 3)};
  for (; left >= 32; left -= 32, p += 32) {
    for (std::size_t k = 0; k < 4; ++k) {
      lane[k] = step(lane[k], load_word(p + 8 * k));
    }
  }
  uint64_t hash = seed ^ (static_cast<uint64_t>(size) * kPrime);
  for (const uint64_t value : lane) {
    hash = mix(hash ^ value);
  }
  for (; left >= 8; left -= 8, p += 8) {
    hash = mix(hash ^ load_word(p));
  }
  if (left > 0) {
    uint64_t word = 0;
    std::memcpy(&word, p, left);
    hash = mix(hash ^ word);
  }
  return mix(hash);
}

}  // namespace pipetransformer::core
