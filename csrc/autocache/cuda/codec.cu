// Kernels of pipetransformer::decode_rows and encode_rows. They give the bits
// of codec.cpp: sums over tokens are those of one thread in their order, and no
// product is fused with a sum.
#include <cuda_runtime.h>

#include <algorithm>

#include "autocache/cuda/codec_kernels.h"

namespace pipetransformer::autocache {

namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 64;   // of a row
constexpr int kMostRows = 65535;  // of a grid; blocks take further ones in turn
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
static_assert(kDigits == kThreads, "a thread for each digit");

__device__ bool is_codec(const DeviceRow& row, Codec codec) {
  return row.codec == static_cast<int64_t>(codec);
}

__device__ RowShape shape_of(const DeviceRow& row, uint64_t channels) {
  return {row.tokens, channels};
}

// A value as bits of float32.
template <ValueType kType>
__device__ uint32_t load(const void* values, uint64_t index) {
  if constexpr (kType == ValueType::kFloat) {
    return static_cast<const uint32_t*>(values)[index];
  } else {
    const uint32_t half = static_cast<const uint16_t*>(values)[index];
    return kType == ValueType::kHalf ? float_bits_of_fp16(half) : half << 16;
  }
}

template <ValueType kType>
__device__ void store(void* values, uint64_t index, uint32_t bits) {
  if constexpr (kType == ValueType::kFloat) {
    static_cast<uint32_t*>(values)[index] = bits;
  } else {
    static_cast<uint16_t*>(values)[index] = static_cast<uint16_t>(
        kType == ValueType::kHalf ? fp16_of(bits) : bf16_of(bits));
  }
}

// Bits as they are, of the type.
template <ValueType kType>
__device__ void copy(void* to, uint64_t index, const void* from, uint64_t at) {
  if constexpr (kType == ValueType::kFloat) {
    static_cast<uint32_t*>(to)[index] = static_cast<const uint32_t*>(from)[at];
  } else {
    static_cast<uint16_t*>(to)[index] = static_cast<const uint16_t*>(from)[at];
  }
}

// Grid: (blocks of a row, rows).
template <ValueType kType>
__global__ void __launch_bounds__(kThreads)
    decode_values(const DecodeParams params) {
  const uint64_t first = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  for (int64_t r = blockIdx.y; r < params.num_rows; r += gridDim.y) {
    const DeviceRow row = params.rows[r];
    const std::byte* from = params.encoded + row.offset;
    const uint64_t begin = r * params.row_values;
    for (uint64_t k = first + row.values; k < params.row_values; k += stride) {
      copy<kType>(params.values, begin + k, &params.fill, 0);
    }
    if (is_codec(row, Codec::kNative)) {
      for (uint64_t k = first; k < row.values; k += stride) {
        copy<kType>(params.values, begin + k, from, k);
      }
    } else if (is_codec(row, Codec::kInt8)) {
      const Int8Parts parts(shape_of(row, params.channels));
      const auto* scales = reinterpret_cast<const float*>(from);
      const auto* steps = reinterpret_cast<const int8_t*>(from + parts.values);
      const auto channels = static_cast<uint32_t>(params.channels);
      for (uint64_t k = first; k < row.values; k += stride) {
        const float scale = scales[static_cast<uint32_t>(k) % channels];
        const float value = __fmul_rn(static_cast<float>(steps[k]), scale);
        store<kType>(params.values, begin + k, bits_of(value));
      }
    } else if (is_codec(row, Codec::kFp16)) {
      for (uint64_t k = first; k < row.values; k += stride) {
        const uint32_t bits = load<ValueType::kHalf>(from, k);
        store<kType>(params.values, begin + k, bits);
      }
    } else {
      for (uint64_t k = first; k < row.values; k += stride) {
        const uint32_t bits = load<ValueType::kBFloat16>(from, k);
        store<kType>(params.values, begin + k, bits);
      }
    }
  }
}

// Behind decode_values: checks int8 rows and puts their outliers in place.
// Grid: rows.
template <ValueType kType>
__global__ void __launch_bounds__(kThreads)
    decode_outliers(const DecodeParams params) {
  const DeviceRow row = params.rows[blockIdx.x];
  if (!is_codec(row, Codec::kInt8)) {
    return;
  }
  const RowShape shape = shape_of(row, params.channels);
  const Int8Parts parts(shape);
  const std::byte* from = params.encoded + row.offset;
  const auto* scales = reinterpret_cast<const uint32_t*>(from);
  const auto* apart = reinterpret_cast<const Apart*>(from + parts.outliers);
  const uint64_t begin = blockIdx.x * params.row_values;
  bool whole = true;
  for (uint64_t c = threadIdx.x; c < params.channels; c += kThreads) {
    whole = whole && is_scale(scales[c]);
  }
  for (uint64_t place = threadIdx.x; place < parts.places; place += kThreads) {
    const uint32_t index = apart[place].index;
    const bool fits = place == 0
                          ? may_be_first(index, shape)
                          : may_follow(apart[place - 1].index, index, shape);
    whole = whole && fits;
    if (index < row.values) {  // also where others are out of order
      store<kType>(params.values, begin + index, bits_of(apart[place].value));
    }
  }
  if (!whole) {
    params.whole[blockIdx.x] = false;
  }
}

// Grid: (blocks of a row, rows).
template <Codec kCodec>
__global__ void __launch_bounds__(kThreads)
    encode_halves(const EncodeParams params) {
  constexpr uint32_t kBeyond =
      kCodec == Codec::kFp16 ? bits_of(kLargestFp16) + 1 : bits_of(kLargest);
  const uint64_t first = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  for (int64_t r = blockIdx.y; r < params.num_rows; r += gridDim.y) {
    const DeviceRow row = params.rows[r];
    if (!is_codec(row, kCodec)) {
      continue;
    }
    auto* to = reinterpret_cast<uint16_t*>(params.encoded + row.offset);
    bool fits = true;
    for (uint64_t k = first; k < row.values; k += stride) {
      const uint32_t bits =
          load<ValueType::kFloat>(params.values, r * params.row_values + k);
      fits = fits && (bits & kMagnitude) < kBeyond;
      to[k] = static_cast<uint16_t>(
          kCodec == Codec::kFp16 ? fp16_of(bits) : bf16_of(bits));
    }
    if (!fits) {
      params.kept[r] = false;
    }
  }
}

// The limit of each channel, above which values stand apart; a thread for each
// channel. Grid: (blocks of channels, rows).
template <ValueType kType>
__global__ void __launch_bounds__(kThreads)
    find_limits(const EncodeParams params) {
  const uint64_t channels = params.channels;
  for (int64_t r = blockIdx.y; r < params.num_rows; r += gridDim.y) {
    const DeviceRow row = params.rows[r];
    if (!is_codec(row, Codec::kInt8)) {
      continue;
    }
    const float share = __fdiv_rn(kOutlier, static_cast<float>(row.tokens));
    bool fits = true;
    for (uint64_t c = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
         c < channels;
         c += uint64_t{gridDim.x} * kThreads) {
      float sum = 0.0f;
      for (uint64_t k = c; k < row.values; k += channels) {
        const uint32_t magnitude =
            load<kType>(params.values, r * params.row_values + k) & kMagnitude;
        fits = fits && magnitude < bits_of(kLargest);
        sum = __fadd_rn(sum, float_of(magnitude));
      }
      params.limits[r * channels + c] = __fmul_rn(sum, share);
    }
    if (!fits) {
      params.kept[r] = false;
    }
  }
}

// The values of a row, and which of them are above their channel's limit.
template <ValueType kType>
class Values {
 public:
  __device__ Values(const EncodeParams& params, int64_t row)
      : params_(params),
        begin_(row * params.row_values),
        limits_(params.limits + row * params.channels) {}

  __device__ uint32_t bits(uint64_t index) const {
    return load<kType>(params_.values, begin_ + index);
  }

  // 0: not above.
  __device__ uint64_t rank(uint64_t index, uint64_t channel) const {
    const float magnitude = float_of(bits(index) & kMagnitude);
    const float limit = limits_[channel];
    return magnitude > limit
               ? outlier_rank(
                     __fdiv_rn(magnitude, limit), static_cast<uint32_t>(index))
               : 0;
  }

 private:
  const EncodeParams& params_;
  const uint64_t begin_;
  const float* limits_;
};

// The least rank of those that have a place: of more than `places` above their
// limits the one at the last place, else 1. By a block, digit by digit.
template <ValueType kType>
__device__ uint64_t last_rank(
    const Values<kType>& values,
    const DeviceRow& row,
    uint32_t channels,
    uint64_t places) {
  __shared__ uint32_t counts[kDigits];
  __shared__ uint64_t known;  // digits found so far
  __shared__ uint64_t left;   // places for what begins with them
  __shared__ bool done;
  if (threadIdx.x == 0) {
    known = 0;
    left = places;
    done = false;
  }
  for (int shift = 64 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    counts[threadIdx.x] = 0;
    __syncthreads();
    const uint64_t begins = known;
    for (uint64_t k = threadIdx.x; k < row.values; k += kThreads) {
      const uint64_t rank = values.rank(k, static_cast<uint32_t>(k) % channels);
      // In two steps: a shift by all 64 bits has no meaning.
      const bool is_like =
          (rank >> shift >> kDigitBits) == (begins >> shift >> kDigitBits);
      if (rank != 0 && is_like) {
        atomicAdd(&counts[rank >> shift & (kDigits - 1)], 1U);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kDigits - 1;
      while (digit > 0 && counts[digit] < left) {
        left -= counts[digit];
        --digit;
      }
      if (counts[digit] <= left) {  // all of them, and none further
        done = true;
      }
      known |= static_cast<uint64_t>(digit) << shift;
    }
    __syncthreads();
    if (done) {
      break;
    }
  }
  return known > 0 ? known : 1;
}

// The sum of what the threads before this one give; `total`: of all.
__device__ uint32_t sum_before(uint32_t value, uint32_t& total) {
  __shared__ uint32_t sums[kThreads];
  sums[threadIdx.x] = value;
  __syncthreads();
  for (int offset = 1; offset < kThreads; offset *= 2) {
    const uint32_t other =
        threadIdx.x >= offset ? sums[threadIdx.x - offset] : 0;
    __syncthreads();
    sums[threadIdx.x] += other;
    __syncthreads();
  }
  total = sums[kThreads - 1];
  const uint32_t before = sums[threadIdx.x] - value;
  __syncthreads();
  return before;
}

// Behind find_limits: chooses the outliers and writes them, in order, and the
// scales. Grid: rows.
template <ValueType kType>
__global__ void __launch_bounds__(kThreads)
    place_outliers(const EncodeParams params) {
  const int64_t r = blockIdx.x;
  const DeviceRow row = params.rows[r];
  if (!is_codec(row, Codec::kInt8) || !params.kept[r]) {
    return;
  }
  const uint64_t channels = params.channels;
  const Int8Parts parts(shape_of(row, channels));
  const Values<kType> values(params, r);
  std::byte* to = params.encoded + row.offset;
  auto* scales = reinterpret_cast<float*>(to);
  auto* apart = reinterpret_cast<Apart*>(to + parts.outliers);
  bool any = false;
  for (uint64_t k = threadIdx.x; k < row.values && !any; k += kThreads) {
    any =
        values.rank(
            k, static_cast<uint32_t>(k) % static_cast<uint32_t>(channels)) != 0;
  }
  uint64_t least = UINT64_MAX;
  if (__syncthreads_or(any)) {
    least = last_rank<kType>(
        values, row, static_cast<uint32_t>(channels), parts.places);
  }
  uint32_t used = 0;
  for (uint64_t begin = 0; begin < channels; begin += kThreads) {
    const uint64_t c = begin + threadIdx.x;
    uint32_t count = 0;
    float peak = 0.0f;
    for (uint64_t k = c; c < channels && k < row.values; k += channels) {
      if (values.rank(k, c) >= least) {
        ++count;
      } else {
        peak = fmaxf(peak, float_of(values.bits(k) & kMagnitude));
      }
    }
    uint32_t total = 0;
    uint32_t place = used + sum_before(count, total);
    used += total;
    for (uint64_t k = c; count > 0; k += channels) {
      if (values.rank(k, c) >= least) {
        apart[place++] = {static_cast<uint32_t>(k), float_of(values.bits(k))};
        --count;
      }
    }
    if (c < channels) {
      const bool counts = peak >= kSmallest;
      scales[c] = counts ? __fdiv_rn(peak, kSteps) : 0.0f;
      params.factors[r * channels + c] =
          counts ? __fdiv_rn(kSteps, peak) : 0.0f;
    }
  }
  for (uint64_t place = used + threadIdx.x; place < parts.places;
       place += kThreads) {
    apart[place] = {kNoIndex, 0.0f};
  }
  if (threadIdx.x == 0) {
    params.last_ranks[r] = least;
  }
}

// Behind place_outliers. Grid: (blocks of a row, rows).
template <ValueType kType>
__global__ void __launch_bounds__(kThreads)
    quantise(const EncodeParams params) {
  const auto channels = static_cast<uint32_t>(params.channels);
  for (int64_t r = blockIdx.y; r < params.num_rows; r += gridDim.y) {
    const DeviceRow row = params.rows[r];
    if (!is_codec(row, Codec::kInt8) || !params.kept[r]) {
      continue;
    }
    const Int8Parts parts(shape_of(row, channels));
    const Values<kType> values(params, r);
    auto* to =
        reinterpret_cast<uint8_t*>(params.encoded + row.offset + parts.values);
    const float* factors = params.factors + r * channels;
    const uint64_t least = params.last_ranks[r];
    for (uint64_t k = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
         k < row.values;
         k += uint64_t{gridDim.x} * kThreads) {
      const uint32_t c = static_cast<uint32_t>(k) % channels;
      const float steps = __fmul_rn(float_of(values.bits(k)), factors[c]);
      const uint32_t rounded = bits_of(__fadd_rn(steps, kRounds));
      to[k] = values.rank(k, c) >= least ? 0 : static_cast<uint8_t>(rounded);
    }
  }
}

dim3 grid_of(uint64_t values, int64_t num_rows) {
  const uint64_t blocks = (values + kThreads - 1) / kThreads;
  return {
      static_cast<unsigned>(
          std::clamp<uint64_t>(blocks, 1, uint64_t{kMostBlocks})),
      static_cast<unsigned>(std::min<int64_t>(num_rows, kMostRows))};
}

template <ValueType kType>
void decode(const DecodeParams& params, cudaStream_t stream) {
  const dim3 grid = grid_of(params.row_values, params.num_rows);
  decode_values<kType><<<grid, kThreads, 0, stream>>>(params);
  if (params.any_int8) {
    const auto rows = static_cast<unsigned>(params.num_rows);
    decode_outliers<kType><<<rows, kThreads, 0, stream>>>(params);
  }
}

template <ValueType kType>
void encode_int8(const EncodeParams& params, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(params.num_rows);
  find_limits<kType>
      <<<grid_of(params.channels, params.num_rows), kThreads, 0, stream>>>(
          params);
  place_outliers<kType><<<rows, kThreads, 0, stream>>>(params);
  quantise<kType>
      <<<grid_of(params.row_values, params.num_rows), kThreads, 0, stream>>>(
          params);
}

const char* outcome() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

static_assert(sizeof(EncodeParams) <= 4096, "kernel parameter limit");

const char* launch_decode(const DecodeParams& params, void* stream) noexcept {
  auto* on = static_cast<cudaStream_t>(stream);
  switch (params.type) {
    case ValueType::kFloat:
      decode<ValueType::kFloat>(params, on);
      break;
    case ValueType::kHalf:
      decode<ValueType::kHalf>(params, on);
      break;
    case ValueType::kBFloat16:
      decode<ValueType::kBFloat16>(params, on);
      break;
  }
  return outcome();
}

const char* launch_encode(const EncodeParams& params, void* stream) noexcept {
  auto* on = static_cast<cudaStream_t>(stream);
  const dim3 grid = grid_of(params.row_values, params.num_rows);
  if (params.codec == Codec::kBf16) {
    encode_halves<Codec::kBf16><<<grid, kThreads, 0, on>>>(params);
  } else if (params.codec == Codec::kFp16) {
    encode_halves<Codec::kFp16><<<grid, kThreads, 0, on>>>(params);
  } else if (params.type == ValueType::kFloat) {
    encode_int8<ValueType::kFloat>(params, on);
  } else if (params.type == ValueType::kHalf) {
    encode_int8<ValueType::kHalf>(params, on);
  } else {
    encode_int8<ValueType::kBFloat16>(params, on);
  }
  return outcome();
}

}  // namespace pipetransformer::autocache
