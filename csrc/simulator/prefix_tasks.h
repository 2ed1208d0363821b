// The frozen layers' part of a step. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/step_costs.h"
#include "simulator/task_graph.h"

namespace pipetransformer::simulator {

// Where a replica's tasks run: by stage, but for the cache.
struct ReplicaResources {
  int32_t replica = 0;
  int32_t cache = 0;
  std::vector<int32_t> compute;
  std::vector<int32_t> forward_engine;   // into the stage
  std::vector<int32_t> backward_engine;  // into the stage
};

// Adds the prefix forward of all micro-batches and the copies of its results
// to the first device, and returns by micro-batch the task after which it is
// there. `last` holds by stage the last task of the device's list so far, -1
// for none, and is moved on. Empty without a prefix.
std::vector<int32_t> add_prefix(
    TaskGraph& graph,
    const planner::StepCosts& costs,
    bool serial,
    const ReplicaResources& resources,
    std::vector<int32_t>& last);

// Of one micro-batch, over all frozen layers.
int64_t prefix_per_microbatch_ns(const planner::StepCosts& costs);

}  // namespace pipetransformer::simulator
