#include "autofreeze/add_each.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace pipetransformer::autofreeze {

namespace {

constexpr int64_t kGrain = 32768;  // as ATen's own element-wise loops

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided &&
         !tensor.is_neg() && tensor.is_non_overlapping_and_dense();
}

// Whether the elements of both lie in memory in the same order.
bool match(const at::Tensor& sum, const at::Tensor& addend) {
  return sum.scalar_type() == addend.scalar_type() &&
         (sum.scalar_type() == at::kFloat ||
          sum.scalar_type() == at::kDouble) &&
         is_plain(sum) && is_plain(addend) && sum.sizes() == addend.sizes() &&
         sum.strides() == addend.strides();
}

// Blocks of a fixed length, so that a compiler that counts on nothing uses
// vector registers.
template <typename T>
void add_range(T* __restrict__ to, const T* __restrict__ from, int64_t size) {
  constexpr int64_t kBlock = 16;
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    for (int64_t k = 0; k < kBlock; ++k) {
      to[i + k] += from[i + k];
    }
  }
  for (; i < size; ++i) {
    to[i] += from[i];
  }
}

template <typename T>
void add(const at::Tensor& sum, const at::Tensor& addend) {
  T* const to = sum.mutable_data_ptr<T>();
  const T* const from = addend.const_data_ptr<T>();
  at::parallel_for(0, sum.numel(), kGrain, [&](int64_t begin, int64_t end) {
    add_range(to + begin, from + begin, end - begin);
  });
}

}  // namespace

void add_each(at::TensorList sums, at::TensorList addends) {
  TORCH_CHECK_VALUE(
      sums.size() == addends.size(),
      "addends: expected ",
      sums.size(),
      ", one for each sum, got ",
      addends.size());
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> other_sums;
  std::vector<at::Tensor> others;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (!match(sums[i], addends[i])) {
      other_sums.push_back(sums[i]);
      others.push_back(addends[i]);
    } else if (sums[i].scalar_type() == at::kFloat) {
      add<float>(sums[i], addends[i]);
    } else {
      add<double>(sums[i], addends[i]);
    }
  }
  if (!others.empty()) {
    at::_foreach_add_(other_sums, others);
  }
}

}  // namespace pipetransformer::autofreeze
