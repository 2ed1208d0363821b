// The ops that bring rows of one tensor of a batch through a codec where they
// are, so that they travel encoded (shapes as Python sees them):
//
//   pipetransformer::decode_rows(Tensor encoded, Tensor offsets, Tensor codecs,
//       Tensor? lengths, int[] sizes, ScalarType dtype, float fill)
//       -> (Tensor rows, Tensor whole)
//
// `encoded` (bytes,) uint8 holds row r from offsets[r] on, encoded by codecs[r]
// (native rows as they are); `sizes` are those of a row. With `lengths` rows
// are ragged: r holds the first lengths[r] of the sizes[0] elements of its dim
// 0, and `fill` stands behind them. `rows` (rows, *sizes) and `whole` (rows,)
// bool are on the device of `encoded`. Rows that are not whole are no encoded
// ones; what `rows` then holds there is worthless.
//
//   pipetransformer::encode_rows(Tensor rows, Tensor? lengths, int codec)
//       -> (Tensor encoded, Tensor offsets, Tensor kept)
//
// The way back. `kept` (rows,) bool on the device of `rows`: which rows are
// encoded; of the others, which the codec does not take or cannot hold, the
// bytes are worthless.
//
// `offsets` (multiples of 8) and `lengths` (rows,) int64 and `codecs` (rows,)
// uint8 are on the host, where they are checked: whatever `encoded` holds,
// nothing outside of the arguments is read and nothing outside of the results
// is written. Because these are read, the ops cannot be traced. Not
// differentiable; on the current stream, whose results they do not wait for.
// Thread-safe (no state). Throws ValueError.
//
// Implementations: CPU (codec.h) in codec_ops.cpp, CUDA in cuda/, and one of
// plain ATen calls for every other backend (CUDA too where the kernels were not
// built). All give equal bits, those of codec.h, on devices whose fp32 rounds
// as IEEE 754 says.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "autocache/codec_format.h"
#include "autocache/record.h"

namespace pipetransformer::autocache {

// Where a row's bytes are, and how they are to be read.
struct RowPlace {
  int64_t offset;
  int64_t length;       // of ragged rows, else 0
  TensorLayout layout;  // with that length
};

// The argument checks; every implementation calls them first, because Python
// enters below any front function.
std::vector<RowPlace> check_decode_rows_args(
    const at::Tensor& encoded,
    const at::Tensor& offsets,
    const at::Tensor& codecs,
    const std::optional<at::Tensor>& lengths,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    double fill);

// Rows that the codec does not take are native, and have no bytes.
std::vector<RowPlace> check_encode_rows_args(
    const at::Tensor& rows,
    const std::optional<at::Tensor>& lengths,
    int64_t codec);

// Bytes of the rows that check_encode_rows_args() lists.
int64_t encoded_size(const std::vector<RowPlace>& places);

// Their offsets, (rows,) int64.
at::Tensor offsets_of(const std::vector<RowPlace>& places);

// Which the codec takes, (rows,) bool.
at::Tensor taken_of(const std::vector<RowPlace>& places);

// (rows, *sizes), not filled.
at::Tensor empty_rows(
    const at::Tensor& encoded,
    std::size_t num_rows,
    at::IntArrayRef sizes,
    at::ScalarType dtype);

// Equal bytes that begin where a row may.
at::Tensor aligned(const at::Tensor& encoded);

}  // namespace pipetransformer::autocache
