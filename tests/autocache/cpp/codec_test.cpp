// Encodes and decodes rows in memory that ends where they do, and decodes any
// bytes; for the address sanitizer, whose allocations are guarded.
//
//   codec_test ROUNDS
//
// Prints what failed and returns 1.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "autocache/codec.h"

namespace {

using namespace pipetransformer::autocache;

int failures = 0;

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    ++failures;
  }
}

void round(std::mt19937_64& random, Encoder& encoder) {
  const auto below = [&](uint64_t limit) { return random() % limit; };
  const RowShape shape{1 + below(70), 1 + below(70)};
  const std::size_t count = shape.tokens * shape.channels;
  std::vector<float> row(count);
  std::normal_distribution<float> normal;
  for (float& value : row) {
    value = below(40) == 0 ? 1e4f * normal(random) : normal(random);
  }
  if (below(20) == 0) {  // any bits
    const auto bits = static_cast<uint32_t>(random());
    std::memcpy(&row[below(count)], &bits, sizeof(bits));
  }
  for (uint8_t k = 1; k < kNumCodecs; ++k) {
    const auto codec = static_cast<Codec>(k);
    const auto bytes = encoded_bytes(codec, shape);
    if (!bytes) {
      check(codec == Codec::kInt8 && shape.tokens == 1, "a shape is taken");
      continue;
    }
    std::vector<std::byte> encoded(*bytes);
    std::vector<float> read(count, NAN);
    if (encoder.encode(codec, shape, row.data(), encoded.data())) {
      check(decode(codec, shape, encoded.data(), read.data()), "it is decoded");
      for (const float value : read) {
        check(std::isfinite(value), "each value is written");
      }
    }
    for (std::byte& byte : encoded) {
      byte = static_cast<std::byte>(random());
    }
    decode(codec, shape, encoded.data(), read.data());
    if (codec == Codec::kInt8) {
      const uint32_t beyond = static_cast<uint32_t>(count + below(3));
      const std::size_t places = outlier_places(count);
      auto* scales = reinterpret_cast<float*>(encoded.data());
      auto* apart = reinterpret_cast<Apart*>(scales + shape.channels);
      const auto decoded = [&] {
        const bool valid = decode(codec, shape, encoded.data(), read.data());
        check(
            valid == is_encoded(codec, shape, encoded.data()),
            "it is decoded if it is valid");
        return valid;
      };
      std::fill_n(scales, shape.channels, 1.0f);
      std::fill_n(apart, places, Apart{kNoIndex, 0.0f});
      check(decoded(), "no outliers");
      apart[places - 1].index = beyond;
      check(!decoded(), "it is beyond");
      apart[places - 1].index = 0;
      check(decoded() == (places == 1), "it is behind an empty place");
      apart[0].index = 0;
      check(decoded() == (places <= 1), "it is there twice");
      apart[places - 1].index = kNoIndex;
      scales[below(shape.channels)] = below(2) == 0 ? NAN : -INFINITY;
      check(!decoded(), "a scale is finite");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::printf("usage: codec_test ROUNDS\n");
    return 2;
  }
  std::mt19937_64 random(1);
  Encoder encoder;
  for (int n = std::stoi(argv[1]); n > 0; --n) {
    round(random, encoder);
  }
  check(!encoded_bytes(Codec::kInt8, {1u << 20, 1u << 12}), "2^32 values");
  check(!encoded_bytes(Codec::kBf16, {UINT64_MAX, UINT64_MAX}), "any sizes");
  check(!encoded_bytes(Codec::kFp16, {0, 4}), "no values");
  return failures == 0 ? 0 : 1;
}
