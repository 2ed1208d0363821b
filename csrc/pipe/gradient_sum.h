// Sum of gradients over micro-batches. No state; thread-safe for different
// sums.
#pragma once

#include <ATen/core/Tensor.h>

namespace pipetransformer::pipe {

// Adds `grad` to `sum`, in place where nobody else holds it. Undefined ones
// count as zero; sparse and dense ones mix.
void add_to(at::Tensor& sum, const at::Tensor& grad);

}  // namespace pipetransformer::pipe
