// Tensors as pieces of a byte buffer, bit by bit, whatever their strides and
// dtype. Stateless; no graph is recorded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pipetransformer::autodp {

// The bytes that a tensor takes in a buffer: pieces begin at multiples of 16,
// so that any dtype may view them.
int64_t padded_bytes(const at::Tensor& tensor);

// Whether the tensor's memory holds its elements in order and nothing else.
bool is_flat(const at::Tensor& tensor);

// The memory of a flat tensor.
at::Tensor as_bytes(const at::Tensor& flat);

// Copy between a tensor and the piece that begins at `offset`, on one device.
void pack(const at::Tensor& tensor, const at::Tensor& buffer, int64_t offset);
void unpack(const at::Tensor& buffer, int64_t offset, const at::Tensor& tensor);

// Lets autograd know that the memory of `tensor` was written.
void note_write(const at::Tensor& tensor);

}  // namespace pipetransformer::autodp
