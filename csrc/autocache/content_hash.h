// Content hashes of tensors: equal values, dtypes and shapes give equal hashes.
// Thread-safe (no state). Tensors on other devices are copied to the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pipetransformer::autocache {

// Hash of dtype, shape and bytes, continuing from `seed`.
uint64_t hash_tensor(const at::Tensor& tensor, uint64_t seed);

// (rows,) int64: per row, one hash over that row of every tensor (rows, ...).
// Throws c10::ValueError when the first dims differ or there is no tensor.
at::Tensor hash_rows(const std::vector<at::Tensor>& tensors);

}  // namespace pipetransformer::autocache
