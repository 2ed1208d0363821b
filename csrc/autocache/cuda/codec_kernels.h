// What the tensor side hands to the codec's kernels: plain data and a stream.
// No torch, no CUDA header, so both sides can include it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "autocache/codec_format.h"

namespace pipetransformer::autocache {

enum class ValueType : int32_t { kFloat, kHalf, kBFloat16 };

// Where a row is and how it is encoded; lies on the device.
struct DeviceRow {
  int64_t offset;   // of its encoded bytes, a multiple of 8
  uint64_t tokens;  // valid ones
  uint64_t values;  // of these tokens
  int64_t codec;    // a Codec
};

// Pointers are to device memory; tensors are contiguous.
struct DecodeParams {
  const std::byte* encoded;
  const DeviceRow* rows;
  int64_t num_rows;
  uint64_t row_values;  // with padding
  uint64_t channels;
  void* values;  // (num_rows, row_values), all of it written
  bool* whole;   // (num_rows,) true before, false where a row is not whole
  ValueType type;
  uint32_t fill;  // bits of what stands behind valid tokens
  bool any_int8;
};

struct EncodeParams {
  const void* values;     // (num_rows, row_values)
  const DeviceRow* rows;  // of kNative or `codec`; native ones are left out
  int64_t num_rows;
  uint64_t row_values;
  uint64_t channels;
  std::byte* encoded;
  bool* kept;            // (num_rows,) false where a row cannot be encoded
  float* limits;         // int8: working memory, (num_rows, channels)
  float* factors;        // the same
  uint64_t* last_ranks;  // the same, (num_rows,)
  ValueType type;
  Codec codec;
};

// Launch on `stream` (a cudaStream_t) of the current device and return at once:
// nullptr, or the error of a launch as static text.
const char* launch_decode(const DecodeParams& params, void* stream) noexcept;
const char* launch_encode(const EncodeParams& params, void* stream) noexcept;

}  // namespace pipetransformer::autocache
