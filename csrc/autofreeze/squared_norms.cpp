#include "autofreeze/squared_norms.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace pipetransformer::autofreeze {

void check_squared_norms_args(at::TensorList tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto dtype = tensors[i].scalar_type();
    TORCH_CHECK_VALUE(
        dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
            dtype == at::kBFloat16,
        "tensors[",
        i,
        "]: expected dtype Double, Float, Half or BFloat16, got ",
        dtype);
    TORCH_CHECK_VALUE(
        tensors[i].device() == tensors[0].device(),
        "tensors[",
        i,
        "]: expected device ",
        tensors[0].device(),
        " of the first tensor, got ",
        tensors[i].device());
  }
}

namespace {

at::TensorOptions output_options(at::TensorList tensors) {
  const auto device =
      tensors.empty() ? at::Device(at::kCPU) : tensors[0].device();
  return at::TensorOptions().dtype(at::kDouble).device(device);
}

struct Square {
  double operator()(double value) const {
    return value * value;
  }
};

struct Absolute {
  double operator()(double value) const {
    return std::abs(value);
  }
};

template <typename Term, typename T>
double sum_of(Term term, const T* data, int64_t size) {
  // Independent lanes let the compiler use vector registers; their number is
  // part of the result's bits.
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) {
      lanes[k] += term(static_cast<double>(data[i + k]));
    }
  }
  double total = 0.0;
  for (; i < size; ++i) {
    total += term(static_cast<double>(data[i]));
  }
  for (const double lane : lanes) {
    total += lane;
  }
  return total;
}

template <typename Term>
at::Tensor sums_cpu(at::TensorList tensors) {
  check_squared_norms_args(tensors);
  const auto count = static_cast<int64_t>(tensors.size());
  at::Tensor result = at::empty({count}, output_options(tensors));
  auto* out = result.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor dense = tensors[i].contiguous();
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, dense.scalar_type(), "norms", [&] {
          out[i] =
              sum_of(Term{}, dense.const_data_ptr<scalar_t>(), dense.numel());
        });
  }
  return result;
}

at::Tensor sums_meta(at::TensorList tensors) {
  check_squared_norms_args(tensors);
  return at::empty(
      {static_cast<int64_t>(tensors.size())}, output_options(tensors));
}

// Any backend without an implementation of its own, and the empty list, which
// names no backend.
template <typename Term>
at::Tensor sums_composite(at::TensorList tensors) {
  check_squared_norms_args(tensors);
  if (tensors.empty()) {
    return at::zeros({0}, output_options(tensors));
  }
  std::vector<at::Tensor> sums;
  sums.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor wide = tensor.to(at::kDouble);
    if constexpr (std::is_same_v<Term, Square>) {
      sums.push_back(wide.square().sum());
    } else {
      sums.push_back(wide.abs().sum());
    }
  }
  return at::stack(sums);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pipetransformer, m) {
  m.def(
      "squared_norms(Tensor[] tensors) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("l1_norms(Tensor[] tensors) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(pipetransformer, CompositeExplicitAutograd, m) {
  m.impl("squared_norms", &sums_composite<Square>);
  m.impl("l1_norms", &sums_composite<Absolute>);
}

TORCH_LIBRARY_IMPL(pipetransformer, CPU, m) {
  m.impl("squared_norms", &sums_cpu<Square>);
  m.impl("l1_norms", &sums_cpu<Absolute>);
}

TORCH_LIBRARY_IMPL(pipetransformer, Meta, m) {
  m.impl("squared_norms", &sums_meta);
  m.impl("l1_norms", &sums_meta);
}

}  // namespace pipetransformer::autofreeze
