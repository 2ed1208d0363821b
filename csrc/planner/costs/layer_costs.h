// What the active layers and the boundaries between them cost per micro-batch
// of one shape. Pure, int64 ns and bytes, thread-safe. Layers are counted from
// the boundary: index 0 is the first active layer.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/input/layer_profile.h"
#include "planner/input/workload.h"

namespace pipetransformer::planner {

using Column = std::vector<int64_t>;

struct LayerCosts {
  // One entry per active layer, mean over the micro-batches, see Note [Unequal
  // micro-batches].
  Column forward_ns;
  Column input_grad_ns;  // see Note [Backward of the first trainable layer]
  Column weight_grad_ns;
  Column gradient_bytes;  // of parameters that train
  // One entry per boundary 0 .. n, of the largest micro-batch; 0 at both ends.
  Column forward_copy_ns;
  Column backward_copy_ns;  // 0 where no gradient passes
  int64_t num_forward_only = 0;
  int64_t optimizer_ns = 0;  // of all of them

  int64_t num_layers() const {
    return static_cast<int64_t>(forward_ns.size());
  }
};

// Number of leading active layers that no gradient passes: they hold no
// trainable parameter and nothing before them does.
int64_t num_forward_only(const Profile& profile, int64_t boundary);

LayerCosts layer_costs(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape);

}  // namespace pipetransformer::planner
