// The ops pipetransformer::squared_norms(Tensor[] tensors) -> Tensor and
// l1_norms: the sum of squares, and of absolute values, of each tensor, added
// up in fp64. Used on accumulated gradients at evaluation points.
//
// Inputs: floating-point tensors (fp64, fp32, fp16, bf16) of any shapes and
// strides on one device. Output: (n,) fp64 on that device; CPU for an empty
// list. Empty tensors give 0. Not differentiable. Runs on the current stream of
// the device, without host synchronisation; the same inputs give the same bits.
// Thread-safe (no state). Throws ValueError.
//
// Implementations: CPU and Meta in squared_norms.cpp, CUDA in cuda/, and one of
// plain ATen calls for every other backend (CUDA too where the kernels were not
// built), equal up to the rounding of another order of sums.
#pragma once

#include <ATen/core/Tensor.h>

namespace pipetransformer::autofreeze {

// The one argument check; every implementation calls it first, because Python
// enters below any front function. Throws ValueError naming the tensor.
void check_squared_norms_args(at::TensorList tensors);

}  // namespace pipetransformer::autofreeze
