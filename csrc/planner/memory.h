// Device memory of a stage under GPipe: parameters, gradients, optimizer state
// and the activations of all M micro-batches, which are in flight at once.
// Pure, int64 bytes, thread-safe. Layers are counted from the boundary.
#pragma once

#include <cstdint>

#include "planner/cost.h"
#include "planner/layer_profile.h"
#include "planner/span_cost.h"

namespace pipetransformer::planner {

// What every device of a replica holds whatever its stage: its context and,
// since the prefix runs on all of them, a copy of the frozen layers.
int64_t
fixed_bytes(const Profile& profile, const Cluster& cluster, int64_t boundary);

// Bytes of a stage without fixed_bytes. With recomputation a stage keeps its
// inputs for all micro-batches and the activations of one.
SpanCost stage_bytes(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape);

}  // namespace pipetransformer::planner
