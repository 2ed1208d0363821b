// Adds tensors to sums, pair by pair: what a policy that sums gradients does in
// every step.
//
// `sums[i] += addends[i]` with the bits of at::Tensor::add_, on the device of
// each pair. Pairs of the host with one dtype (fp32, fp64) and one dense layout
// take one loop each, without the calls per tensor that cost more than the
// additions of a small model; all others are ATen's. Takes no part in autograd.
// Thread-safe for different sums. Throws ValueError if there are not as many.
#pragma once

#include <ATen/core/Tensor.h>

namespace pipetransformer::autofreeze {

void add_each(at::TensorList sums, at::TensorList addends);

}  // namespace pipetransformer::autofreeze
