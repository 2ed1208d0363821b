// Runs the kernels of csrc/autocache/cuda/codec.cu on the host and compares
// them with codec.cpp, bit for bit; then has them decode any bytes. In memory
// that ends where rows do, for the address sanitizer.
//
//   codec_kernels_test ROUNDS SEED
//
// Prints what failed and returns 1.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "autocache/codec.h"
#include "autocache/cuda/codec_kernels.h"

namespace {

using namespace pipetransformer::autocache;

int failures = 0;

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    ++failures;
  }
}

// A batch of rows of one tensor, some of them shorter than others.
struct Batch {
  ValueType type;
  uint64_t channels;
  uint64_t padded;  // tokens
  std::vector<uint64_t> tokens;

  uint64_t row_values() const {
    return padded * channels;
  }

  std::size_t value_bytes() const {
    return type == ValueType::kFloat ? 4 : 2;
  }

  std::vector<std::byte> empty() const {
    return std::vector<std::byte>(tokens.size() * row_values() * value_bytes());
  }
};

void narrow(ValueType type, const float* from, std::byte* to, uint64_t count) {
  if (type == ValueType::kFloat) {
    std::memcpy(to, from, count * sizeof(float));
  } else if (type == ValueType::kHalf) {
    narrow_fp16(from, reinterpret_cast<uint16_t*>(to), count);
  } else {
    narrow_bf16(from, reinterpret_cast<uint16_t*>(to), count);
  }
}

std::vector<float>
widened(ValueType type, const std::byte* from, uint64_t count) {
  std::vector<float> values(count);
  if (type == ValueType::kFloat) {
    std::memcpy(values.data(), from, count * sizeof(float));
  } else if (type == ValueType::kHalf) {
    widen_fp16(reinterpret_cast<const uint16_t*>(from), values.data(), count);
  } else {
    widen_bf16(reinterpret_cast<const uint16_t*>(from), values.data(), count);
  }
  return values;
}

std::vector<float> row_of(std::mt19937_64& random, uint64_t count) {
  const auto below = [&](uint64_t limit) { return random() % limit; };
  std::normal_distribution<float> normal;
  std::vector<float> row(count);
  const uint64_t kind = below(6);
  for (float& value : row) {
    value = normal(random);
    if (kind == 1 && below(20) == 0) {
      value *= 1e3f;
    } else if (kind == 2) {  // as far above the mean as each other
      value = below(25) == 0 ? 1.0f : 0.0f;
    } else if (kind == 3 && below(9) == 0) {
      value *= 1e-40f;
    } else if (kind == 4) {
      value = below(60) == 0 ? 1e-45f : -0.0f;
    }
  }
  if (kind == 5) {
    const float marks[] = {-INFINITY, NAN, 1e30f, 65505.0f, 65504.0f, 1e29f};
    row[below(count)] = marks[below(6)];
  }
  return row;
}

void round(std::mt19937_64& random, Encoder& encoder, Codec codec) {
  const auto below = [&](uint64_t limit) { return random() % limit; };
  Batch batch;
  batch.type = codec == Codec::kInt8 ? static_cast<ValueType>(below(3))
                                     : ValueType::kFloat;
  batch.channels = 1 + below(below(8) == 0 ? 600 : 40);
  batch.padded = 2 + below(70);
  const uint64_t num_rows = 1 + below(3);
  std::vector<DeviceRow> rows;
  uint64_t bytes = 0;
  for (uint64_t r = 0; r < num_rows; ++r) {
    const uint64_t tokens = below(2) == 0 ? batch.padded : below(batch.padded);
    batch.tokens.push_back(tokens);
    const auto size = encoded_bytes(codec, {tokens, batch.channels});
    const Codec kept = size ? codec : Codec::kNative;
    rows.push_back(
        {static_cast<int64_t>(bytes),
         tokens,
         tokens * batch.channels,
         static_cast<int64_t>(kept)});
    bytes += (size.value_or(0) + 7) / 8 * 8;
  }
  std::vector<std::byte> values = batch.empty();
  for (uint64_t r = 0; r < num_rows; ++r) {
    const auto row = row_of(random, batch.row_values());
    narrow(
        batch.type,
        row.data(),
        values.data() + r * batch.row_values() * batch.value_bytes(),
        batch.row_values());
  }

  std::vector<std::byte> encoded(bytes);
  const auto kept = std::make_unique<bool[]>(num_rows);
  std::fill_n(kept.get(), num_rows, true);
  std::vector<float> limits(num_rows * batch.channels);
  std::vector<float> factors(limits.size());
  std::vector<uint64_t> ranks(num_rows);
  EncodeParams to{};
  to.values = values.data();
  to.rows = rows.data();
  to.num_rows = static_cast<int64_t>(num_rows);
  to.row_values = batch.row_values();
  to.channels = batch.channels;
  to.encoded = encoded.data();
  to.kept = kept.get();
  to.limits = limits.data();
  to.factors = factors.data();
  to.last_ranks = ranks.data();
  to.type = batch.type;
  to.codec = codec;
  check(launch_encode(to, nullptr) == nullptr, "it is launched");

  for (uint64_t r = 0; r < num_rows; ++r) {
    if (rows[r].codec == 0) {
      continue;
    }
    const RowShape shape{rows[r].tokens, batch.channels};
    const auto row = widened(
        batch.type,
        values.data() + r * batch.row_values() * batch.value_bytes(),
        rows[r].values);
    std::vector<std::byte> expected(*encoded_bytes(codec, shape));
    const bool fits = encoder.encode(codec, shape, row.data(), expected.data());
    check(fits == kept[r], "the same rows are encoded");
    check(
        !fits || std::equal(
                     expected.begin(),
                     expected.end(),
                     encoded.begin() + rows[r].offset),
        "their bytes are equal");
    if (!fits || below(4) == 0) {  // any bytes
      for (uint64_t k = 0; k < expected.size(); ++k) {
        encoded[rows[r].offset + k] = static_cast<std::byte>(random());
      }
    }
    if (codec == Codec::kInt8 && below(2) == 0) {  // one outlier anywhere
      const uint64_t beyond = below(2) == 0 ? 0 : random();
      const auto index = static_cast<uint32_t>(
          below(2) == 0 ? rows[r].values + beyond : below(rows[r].values));
      std::byte* place =
          encoded.data() + rows[r].offset + Int8Parts(shape).outliers;
      std::memcpy(place, &index, sizeof(index));
    }
  }

  std::vector<std::byte> read = batch.empty();
  const auto whole = std::make_unique<bool[]>(num_rows);
  std::fill_n(whole.get(), num_rows, true);
  std::vector<DeviceRow> sources = rows;
  std::vector<std::byte> bytes_read = encoded;
  for (DeviceRow& row : sources) {
    if (row.codec == 0) {  // native, behind the others
      row.offset = static_cast<int64_t>(bytes_read.size());
      bytes_read.resize(
          (bytes_read.size() + row.values * batch.value_bytes() + 7) / 8 * 8,
          std::byte{7});
    }
  }
  const float filling = 0.5f;
  std::vector<std::byte> fill(4);
  narrow(batch.type, &filling, fill.data(), 1);
  DecodeParams from{};
  from.encoded = bytes_read.data();
  from.rows = sources.data();
  from.num_rows = static_cast<int64_t>(num_rows);
  from.row_values = batch.row_values();
  from.channels = batch.channels;
  from.values = read.data();
  from.whole = whole.get();
  from.type = batch.type;
  std::memcpy(&from.fill, fill.data(), sizeof(from.fill));
  from.any_int8 = codec == Codec::kInt8;
  check(launch_decode(from, nullptr) == nullptr, "it is launched");

  for (uint64_t r = 0; r < num_rows; ++r) {
    const DeviceRow& row = sources[r];
    std::vector<std::byte> expected(batch.row_values() * batch.value_bytes());
    for (uint64_t k = row.values; k < batch.row_values(); ++k) {
      std::memcpy(
          expected.data() + k * batch.value_bytes(),
          fill.data(),
          batch.value_bytes());
    }
    bool valid = true;
    if (row.codec == 0) {
      std::fill_n(
          expected.begin(), row.values * batch.value_bytes(), std::byte{7});
    } else {
      std::vector<float> wide(row.values);
      valid = decode(
          codec,
          {row.tokens, batch.channels},
          bytes_read.data() + row.offset,
          wide.data());
      narrow(batch.type, wide.data(), expected.data(), row.values);
    }
    check(valid == whole[r], "the same rows are whole");
    check(
        !valid || std::equal(
                      expected.begin(),
                      expected.end(),
                      read.begin() + r * expected.size()),
        "they are read as on the host");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::printf("usage: codec_kernels_test ROUNDS SEED\n");
    return 2;
  }
  std::mt19937_64 random(std::stoull(argv[2]));
  Encoder encoder;
  for (int n = std::stoi(argv[1]); n > 0; --n) {
    for (const Codec codec : {Codec::kBf16, Codec::kFp16, Codec::kInt8}) {
      round(random, encoder, codec);
    }
  }
  return failures == 0 ? 0 : 1;
}
