#include "autocache/codec.h"

#include <algorithm>
#include <cstring>
#include <tuple>

// The loops below are written for the compiler to vectorise, which it does at
// this level only. Where the loader can choose, it takes AVX2; without FMA,
// which would round otherwise. Sanitizers do not stand its choosing.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && \
    defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) &&            \
    !defined(__SANITIZE_THREAD__)
#define PIPETRANSFORMER_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define PIPETRANSFORMER_CLONES
#endif

namespace pipetransformer::autocache {

namespace {

constexpr uint64_t kMaxValues =
    UINT32_MAX - 1;  // indices fit, kNoIndex is none

// The two below return the largest magnitude: as bits, NaN is the largest.

PIPETRANSFORMER_CLONES uint32_t to_bf16(
    const float* __restrict__ from,
    uint16_t* __restrict__ to,
    std::size_t count) noexcept {
  int32_t most = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const uint32_t bits = bits_of(from[k]);
    most = std::max(most, static_cast<int32_t>(bits & kMagnitude));
    to[k] = static_cast<uint16_t>(bf16_of(bits));
  }
  return static_cast<uint32_t>(most);
}

PIPETRANSFORMER_CLONES uint32_t to_fp16(
    const float* __restrict__ from,
    uint16_t* __restrict__ to,
    std::size_t count) noexcept {
  int32_t most = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const uint32_t bits = bits_of(from[k]);
    most = std::max(most, static_cast<int32_t>(bits & kMagnitude));
    to[k] = static_cast<uint16_t>(fp16_of(bits));
  }
  return static_cast<uint32_t>(most);
}

PIPETRANSFORMER_CLONES void from_bf16(
    const uint16_t* __restrict__ from,
    float* __restrict__ to,
    std::size_t count) noexcept {
  for (std::size_t k = 0; k < count; ++k) {
    to[k] = float_of(static_cast<uint32_t>(from[k]) << 16);
  }
}

PIPETRANSFORMER_CLONES void from_fp16(
    const uint16_t* __restrict__ from,
    float* __restrict__ to,
    std::size_t count) noexcept {
  for (std::size_t k = 0; k < count; ++k) {
    to[k] = float_of(float_bits_of_fp16(from[k]));
  }
}

// Adds a token's magnitudes to the channels' sums and peaks, and returns the
// largest of them, or `most`.
PIPETRANSFORMER_CLONES int32_t add_token(
    const float* __restrict__ token,
    float* __restrict__ sums,
    float* __restrict__ peaks,
    std::size_t channels,
    int32_t most) noexcept {
  for (std::size_t c = 0; c < channels; ++c) {
    const uint32_t bits = bits_of(token[c]) & kMagnitude;
    const float magnitude = float_of(bits);
    most = std::max(most, static_cast<int32_t>(bits));
    sums[c] += magnitude;
    peaks[c] = magnitude > peaks[c] ? magnitude : peaks[c];
  }
  return most;
}

// Whether a magnitude is above its channel's limit.
PIPETRANSFORMER_CLONES bool exceeds(
    const float* __restrict__ values,
    const float* __restrict__ limits,
    std::size_t channels) noexcept {
  int32_t found = 0;
  for (std::size_t c = 0; c < channels; ++c) {
    const float magnitude = float_of(bits_of(values[c]) & kMagnitude);
    found |= magnitude > limits[c] ? 1 : 0;
  }
  return found != 0;
}

PIPETRANSFORMER_CLONES void quantise_token(
    const float* __restrict__ token,
    const float* __restrict__ factors,
    int8_t* __restrict__ to,
    std::size_t channels) noexcept {
  for (std::size_t c = 0; c < channels; ++c) {
    to[c] = static_cast<int8_t>(bits_of(token[c] * factors[c] + kRounds));
  }
}

PIPETRANSFORMER_CLONES void restore_token(
    const int8_t* __restrict__ from,
    const float* __restrict__ scales,
    float* __restrict__ to,
    std::size_t channels) noexcept {
  for (std::size_t c = 0; c < channels; ++c) {
    to[c] = static_cast<float>(from[c]) * scales[c];
  }
}

bool is_int8(RowShape shape, const std::byte* from) noexcept {
  const Int8Parts parts(shape);
  const auto* scales = reinterpret_cast<const float*>(from);
  for (uint64_t c = 0; c < shape.channels; ++c) {
    if (!is_scale(bits_of(scales[c]))) {
      return false;
    }
  }
  const auto* apart = reinterpret_cast<const Apart*>(from + parts.outliers);
  if (!may_be_first(apart[0].index, shape)) {
    return false;
  }
  for (uint64_t place = 1; place < parts.places; ++place) {
    if (!may_follow(apart[place - 1].index, apart[place].index, shape)) {
      return false;
    }
  }
  return true;
}

void decode_int8(RowShape shape, const std::byte* from, float* to) noexcept {
  const Int8Parts parts(shape);
  const auto* scales = reinterpret_cast<const float*>(from);
  const auto* values = reinterpret_cast<const int8_t*>(from + parts.values);
  for (uint64_t token = 0; token < shape.tokens; ++token) {
    const uint64_t first = token * shape.channels;
    restore_token(values + first, scales, to + first, shape.channels);
  }
  const auto* apart = reinterpret_cast<const Apart*>(from + parts.outliers);
  for (uint64_t place = 0;
       place < parts.places && apart[place].index != kNoIndex;
       ++place) {
    to[apart[place].index] = apart[place].value;
  }
}

}  // namespace

std::optional<uint64_t> encoded_bytes(Codec codec, RowShape shape) noexcept {
  if (shape.tokens == 0 || shape.channels == 0 ||
      shape.tokens > kMaxValues / shape.channels) {
    return std::nullopt;
  }
  const uint64_t count = shape.tokens * shape.channels;
  switch (codec) {
    case Codec::kBf16:
    case Codec::kFp16:
      return count * sizeof(uint16_t);
    case Codec::kInt8:
      return shape.tokens < 2 ? std::nullopt
                              : std::optional(Int8Parts(shape).values + count);
    case Codec::kNative:
      break;
  }
  return std::nullopt;
}

bool Encoder::encode(
    Codec codec,
    RowShape shape,
    const float* from,
    std::byte* to) {
  const uint64_t count = shape.tokens * shape.channels;
  auto* halves = reinterpret_cast<uint16_t*>(to);
  switch (codec) {
    case Codec::kBf16:
      return to_bf16(from, halves, count) < bits_of(kLargest);
    case Codec::kFp16:
      return to_fp16(from, halves, count) <= bits_of(kLargestFp16);
    case Codec::kInt8:
      return encode_int8(shape, from, to);
    case Codec::kNative:
      break;
  }
  return false;
}

bool Encoder::encode_int8(RowShape shape, const float* from, std::byte* to) {
  const uint64_t channels = shape.channels;
  limits_.assign(channels, 0.0f);
  peaks_.assign(channels, 0.0f);
  int32_t most = 0;
  for (uint64_t token = 0; token < shape.tokens; ++token) {
    most = add_token(
        from + token * channels, limits_.data(), peaks_.data(), channels, most);
  }
  if (static_cast<uint32_t>(most) >= bits_of(kLargest)) {
    return false;
  }
  for (float& limit : limits_) {
    limit *= kOutlier / static_cast<float>(shape.tokens);
  }
  outliers_.clear();
  if (exceeds(peaks_.data(), limits_.data(), channels)) {
    find_outliers(shape, from);
    leave_out_outliers(shape, from);
  }
  const Int8Parts parts(shape);
  auto* scales = reinterpret_cast<float*>(to);
  factors_.resize(channels);
  for (uint64_t c = 0; c < channels; ++c) {
    const bool counts = peaks_[c] >= kSmallest;
    scales[c] = counts ? peaks_[c] / kSteps : 0.0f;
    factors_[c] = counts ? kSteps / peaks_[c] : 0.0f;
  }
  auto* values = reinterpret_cast<int8_t*>(to + parts.values);
  for (uint64_t token = 0; token < shape.tokens; ++token) {
    const uint64_t first = token * channels;
    quantise_token(from + first, factors_.data(), values + first, channels);
  }
  for (uint64_t place = 0; place < parts.places; ++place) {
    Apart apart{kNoIndex, 0.0f};
    if (place < outliers_.size()) {
      const Outlier& outlier = outliers_[place];
      const uint64_t index = outlier.token * channels + outlier.channel;
      apart = {static_cast<uint32_t>(index), from[index]};
      values[index] = 0;
    }
    std::memcpy(
        to + parts.outliers + place * sizeof(apart), &apart, sizeof(apart));
  }
  return true;
}

// The values that are furthest above their channel's limit, as many as there
// are places, channel by channel.
void Encoder::find_outliers(RowShape shape, const float* from) {
  for (uint64_t token = 0; token < shape.tokens; ++token) {
    const float* values = from + token * shape.channels;
    if (!exceeds(values, limits_.data(), shape.channels)) {
      continue;
    }
    for (uint64_t c = 0; c < shape.channels; ++c) {
      const float magnitude = float_of(bits_of(values[c]) & kMagnitude);
      if (magnitude > limits_[c]) {
        outliers_.push_back(
            {static_cast<uint32_t>(token),
             static_cast<uint32_t>(c),
             magnitude / limits_[c]});
      }
    }
  }
  const uint64_t places = outlier_places(shape.tokens * shape.channels);
  if (outliers_.size() > places) {
    const auto end = outliers_.begin() + static_cast<std::ptrdiff_t>(places);
    std::nth_element(
        outliers_.begin(),
        end,
        outliers_.end(),
        [](const Outlier& one, const Outlier& other) {
          return std::tie(other.times, one.token, one.channel) <
                 std::tie(one.times, other.token, other.channel);
        });
    outliers_.erase(end, outliers_.end());
  }
  std::sort(
      outliers_.begin(),
      outliers_.end(),
      [](const Outlier& one, const Outlier& other) {
        return std::tie(one.channel, one.token) <
               std::tie(other.channel, other.token);
      });
}

// Peaks of the channels that lost one.
void Encoder::leave_out_outliers(RowShape shape, const float* from) {
  auto next = outliers_.begin();
  while (next != outliers_.end()) {
    const uint32_t channel = next->channel;
    float peak = 0.0f;
    for (uint64_t token = 0; token < shape.tokens; ++token) {
      if (next != outliers_.end() && next->channel == channel &&
          next->token == token) {
        ++next;
        continue;
      }
      const float value = from[token * shape.channels + channel];
      peak = std::max(peak, float_of(bits_of(value) & kMagnitude));
    }
    peaks_[channel] = peak;
  }
}

bool is_encoded(Codec codec, RowShape shape, const std::byte* from) noexcept {
  return codec == Codec::kInt8 ? is_int8(shape, from) : codec != Codec::kNative;
}

bool decode(
    Codec codec,
    RowShape shape,
    const std::byte* from,
    float* to) noexcept {
  const uint64_t count = shape.tokens * shape.channels;
  switch (codec) {
    case Codec::kBf16:
      from_bf16(reinterpret_cast<const uint16_t*>(from), to, count);
      return true;
    case Codec::kFp16:
      from_fp16(reinterpret_cast<const uint16_t*>(from), to, count);
      return true;
    case Codec::kInt8:
      if (!is_int8(shape, from)) {
        return false;
      }
      decode_int8(shape, from, to);
      return true;
    case Codec::kNative:
      break;
  }
  return false;
}

void widen_bf16(const uint16_t* from, float* to, std::size_t count) noexcept {
  from_bf16(from, to, count);
}

void widen_fp16(const uint16_t* from, float* to, std::size_t count) noexcept {
  from_fp16(from, to, count);
}

void narrow_bf16(const float* from, uint16_t* to, std::size_t count) noexcept {
  to_bf16(from, to, count);
}

void narrow_fp16(const float* from, uint16_t* to, std::size_t count) noexcept {
  to_fp16(from, to, count);
}

}  // namespace pipetransformer::autocache
