#include "autodp/transfer/packing.h"

#include <cstring>

namespace pipetransformer::autodp {

namespace {

constexpr int64_t kAlignment = 16;

// The elements of one tensor that begin at `offset` of `buffer`.
at::Tensor
piece_of(const at::Tensor& buffer, int64_t offset, const at::Tensor& like) {
  return buffer.narrow(0, offset, static_cast<int64_t>(like.nbytes()))
      .view(like.scalar_type())
      .view(like.sizes());
}

}  // namespace

int64_t padded_bytes(const at::Tensor& tensor) {
  const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
  return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

bool is_flat(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor as_bytes(const at::Tensor& flat) {
  return flat.detach().view({-1}).view(at::kByte);
}

void pack(const at::Tensor& tensor, const at::Tensor& buffer, int64_t offset) {
  if (tensor.is_cpu() && is_flat(tensor)) {
    auto* target = buffer.mutable_data_ptr<uint8_t>() + offset;
    std::memcpy(target, tensor.const_data_ptr(), tensor.nbytes());
  } else {
    piece_of(buffer, offset, tensor).copy_(tensor.detach());
  }
}

void unpack(
    const at::Tensor& buffer,
    int64_t offset,
    const at::Tensor& tensor) {
  if (tensor.is_cpu() && is_flat(tensor)) {
    const auto* origin = buffer.const_data_ptr<uint8_t>() + offset;
    std::memcpy(tensor.mutable_data_ptr(), origin, tensor.nbytes());
    note_write(tensor);
  } else {
    tensor.detach().copy_(piece_of(buffer, offset, tensor));
  }
}

void note_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace pipetransformer::autodp
