// 64-bit content hash of the project: four multiply-xorshift lanes over 8-byte
// words, mixed at the end. Not cryptographic: it detects differences between
// honest peers and torn or foreign records. Torch-free, thread-safe (no state),
// little-endian hosts.
//
// One definition serves plan hashes, model signatures, input hashes and
// fingerprints, so that equal bytes give equal hashes on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pipetransformer::core {

inline constexpr uint64_t kHashSeed = 0xcbf29ce484222325ULL;

// Hashes `size` bytes at `data`, continuing from `seed`. A chain of calls
// depends on how the bytes are split: hash(ab) != hash(b, hash(a)).
uint64_t hash_bytes(
    const void* data,
    std::size_t size,
    uint64_t seed = kHashSeed) noexcept;

inline uint64_t
hash_string(std::string_view text, uint64_t seed = kHashSeed) noexcept {
  return hash_bytes(text.data(), text.size(), seed);
}

}  // namespace pipetransformer::core
