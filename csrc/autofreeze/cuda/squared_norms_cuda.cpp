// Tensor side of the squared-norms kernel: checks, memory, stream. Empty where
// the kernels were not built; CUDA tensors then take the ATen implementation.
#ifdef PIPETRANSFORMER_WITH_KERNELS

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "autofreeze/cuda/squared_norms_kernel.h"
#include "autofreeze/squared_norms.h"

namespace pipetransformer::autofreeze {

namespace {

ElementType element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return ElementType::kDouble;
    case at::kFloat:
      return ElementType::kFloat;
    case at::kHalf:
      return ElementType::kHalf;
    default:  // the argument check leaves no other
      return ElementType::kBFloat16;
  }
}

template <Term term>
at::Tensor sums_cuda(at::TensorList tensors) {
  check_squared_norms_args(tensors);
  const c10::Device device = tensors[0].device();
  const c10::DeviceGuard guard(device);
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto count = static_cast<int64_t>(tensors.size());
  constexpr int64_t kBlocks = SquaredNormsParams::kBlocksPerTensor;
  const at::Tensor partial_sums =
      at::empty({count, kBlocks}, tensors[0].options().dtype(at::kDouble));
  auto* out = partial_sums.mutable_data_ptr<double>();
  // Copies made by contiguous() live until the launches that read them are on
  // the stream; the caching allocator reuses their memory in stream order.
  std::vector<at::Tensor> dense;
  dense.reserve(tensors.size());
  for (int64_t first = 0; first < count;) {
    SquaredNormsParams params{};
    params.num_tensors = static_cast<int>(
        std::min<int64_t>(SquaredNormsParams::kMaxTensors, count - first));
    params.term = term;
    params.partial_sums = out + first * kBlocks;
    for (int i = 0; i < params.num_tensors; ++i) {
      dense.push_back(tensors[first + i].contiguous());
      params.items[i] = {
          dense.back().const_data_ptr(),
          dense.back().numel(),
          element_type(dense.back().scalar_type())};
    }
    const char* error = launch_squared_norms(params, stream.native_handle());
    TORCH_CHECK(
        error == nullptr,
        "squared_norms kernel: expected a launch on ",
        device,
        ", got ",
        error);
    first += params.num_tensors;
  }
  return partial_sums.sum(1);
}

}  // namespace

TORCH_LIBRARY_IMPL(pipetransformer, CUDA, m) {
  m.impl("squared_norms", &sums_cuda<Term::kSquare>);
  m.impl("l1_norms", &sums_cuda<Term::kAbsolute>);
}

}  // namespace pipetransformer::autofreeze

#endif  // PIPETRANSFORMER_WITH_KERNELS
