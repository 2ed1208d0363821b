// The numbers of the codecs' format, and the arithmetic on single values that
// makes and reads it: one text for the host and for kernels, so that both give
// equal bits. Torch-free, and free of what a kernel cannot call.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PIPETRANSFORMER_ANYWHERE __host__ __device__
#else
#define PIPETRANSFORMER_ANYWHERE
#endif

namespace pipetransformer::autocache {

// Numbers are part of the format of records.
enum class Codec : uint8_t { kNative = 0, kBf16 = 1, kFp16 = 2, kInt8 = 3 };
inline constexpr uint8_t kNumCodecs = 4;

struct RowShape {
  uint64_t tokens = 0;
  uint64_t channels = 0;
};

// Of an int8 row, a value that stands apart.
struct Apart {
  uint32_t index;
  float value;
};

inline constexpr uint32_t kNoIndex = UINT32_MAX;
inline constexpr uint32_t kMagnitude = 0x7fffffff;
inline constexpr uint32_t kInfinity = 0x7f800000;
// Beyond, values are marks such as those of masks, and sums leave the range.
inline constexpr float kLargest = 1e30f;
inline constexpr float kLargestFp16 = 65504.0f;
inline constexpr float kSmallest =
    1e-30f;  // of a channel's values: else they are 0
inline constexpr float kSteps = 127.0f;  // of a scale
inline constexpr float kOutlier = 8.0f;  // times the mean of the channel
inline constexpr float kRounds =
    0x1.8p23f;  // its last bits count whole numbers

PIPETRANSFORMER_ANYWHERE constexpr uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

PIPETRANSFORMER_ANYWHERE constexpr float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

// One or the other, without a branch, which the compiler would not vectorise.
PIPETRANSFORMER_ANYWHERE constexpr uint32_t
chosen(bool first, uint32_t one, uint32_t other) {
  const uint32_t mask = -static_cast<uint32_t>(first);
  return (one & mask) | (other & ~mask);
}

PIPETRANSFORMER_ANYWHERE constexpr uint32_t bf16_of(uint32_t bits) {
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Of magnitudes up to kLargestFp16.
PIPETRANSFORMER_ANYWHERE constexpr uint32_t fp16_of(uint32_t bits) {
  constexpr uint32_t kBias = uint32_t{127 - 15} << 23;
  constexpr float kTiny = 0.5f;  // its last bit is that of the smallest halves
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t normal =
      (magnitude - kBias + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const uint32_t tiny = bits_of(float_of(magnitude) + kTiny) - bits_of(kTiny);
  const bool is_tiny = magnitude < bits_of(0x1p-14f);
  return chosen(is_tiny, tiny, normal) | (bits >> 16 & 0x8000);
}

PIPETRANSFORMER_ANYWHERE constexpr uint32_t float_bits_of_fp16(uint32_t half) {
  constexpr uint32_t kBias = uint32_t{127 - 15} << 23;
  constexpr uint32_t kStep = uint32_t{1} << 23;  // of the exponent
  const uint32_t shifted = (half & 0x7fff) << 13;
  const uint32_t normal = shifted + kBias;
  const uint32_t special = normal + (shifted >= 31 * kStep ? kBias : 0);
  const uint32_t tiny =
      bits_of(float_of(shifted + kBias + kStep) - float_of(kBias + kStep));
  return chosen(shifted < kStep, tiny, special) | (half & 0x8000) << 16;
}

// Exact values that an int8 row of so many values has room for.
PIPETRANSFORMER_ANYWHERE constexpr uint64_t
outlier_places(uint64_t values) noexcept {
  return (values + 255) / 256;
}

// Where the parts of an int8 row begin, in bytes; scales do at 0.
struct Int8Parts {
  PIPETRANSFORMER_ANYWHERE constexpr explicit Int8Parts(RowShape shape) noexcept
      : places(outlier_places(shape.tokens * shape.channels)),
        outliers(shape.channels * sizeof(float)),
        values(outliers + places * sizeof(Apart)) {}

  uint64_t places;
  uint64_t outliers;
  uint64_t values;
};

PIPETRANSFORMER_ANYWHERE constexpr bool is_scale(uint32_t bits) noexcept {
  return (bits & kMagnitude) < kInfinity;
}

// Whether the places of an int8 row may hold `next` behind `previous`: outliers
// come channel by channel, each once, and then only empty places.
PIPETRANSFORMER_ANYWHERE constexpr bool
may_follow(uint32_t previous, uint32_t next, RowShape shape) noexcept {
  if (next == kNoIndex) {
    return true;
  }
  const uint64_t one = previous % shape.channels;
  const uint64_t other = next % shape.channels;
  return previous != kNoIndex && next < shape.tokens * shape.channels &&
         (one < other || (one == other && previous < next));
}

PIPETRANSFORMER_ANYWHERE constexpr bool
may_be_first(uint32_t index, RowShape shape) noexcept {
  return index == kNoIndex || index < shape.tokens * shape.channels;
}

// Orders values that are above their channel's limit: the furthest first, of
// equal ones the one at the smaller index. Larger is earlier.
PIPETRANSFORMER_ANYWHERE constexpr uint64_t
outlier_rank(float times_limit, uint32_t index) noexcept {
  return uint64_t{bits_of(times_limit)} << 32 | (UINT32_MAX - index);
}

}  // namespace pipetransformer::autocache
