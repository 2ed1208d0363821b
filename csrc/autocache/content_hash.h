// Content hashes of tensors: equal values, dtypes and shapes give equal hashes.
// Thread-safe (no state). Tensors on other devices are copied to the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "autocache/tensor_rows.h"

namespace pipetransformer::autocache {

// Hash of dtype, shape and bytes, continuing from `seed`.
uint64_t hash_tensor(const at::Tensor& tensor, uint64_t seed);

// (rows,) int64: per row, one hash over that row of every tensor (rows, ...);
// of ragged tensors over the row's first `lengths` (rows,) elements of dim 1,
// so padding does not count. Throws c10::ValueError when the first dims differ,
// there is no tensor, or a length is out of range.
at::Tensor hash_rows(
    const std::vector<at::Tensor>& tensors,
    const RaggedTensors& ragged = {},
    const std::optional<at::Tensor>& lengths = std::nullopt);

}  // namespace pipetransformer::autocache
