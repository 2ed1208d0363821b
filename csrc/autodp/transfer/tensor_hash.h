// Hashes of a replica's tensors, for the comparison between ranks.
//
// Thread-safe; blocks while it reads, so call it without the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pipetransformer::autodp {

// Continues `seed` with dtype and shape.
uint64_t hash_layout(const at::Tensor& tensor, uint64_t seed);

// 64-bit hash of dtype, shape and bits. Equal tensors have equal hashes on
// every rank, whatever their strides and device; 0.0 and -0.0 differ.
uint64_t hash_tensor(const at::Tensor& tensor);

// `hash_tensor` of each; those on CPU on as many threads as torch's operators
// have.
std::vector<uint64_t> hash_tensors(const std::vector<at::Tensor>& tensors);

}  // namespace pipetransformer::autodp
