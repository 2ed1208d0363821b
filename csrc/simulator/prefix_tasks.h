// The frozen layers' part of a step. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/costs/step_costs.h"
#include "simulator/devices.h"
#include "simulator/step_options.h"
#include "simulator/task_graph.h"

namespace pipetransformer::simulator {

// Adds the prefix forward of all micro-batches and the copies of its results
// to the first device. Replicated: device d runs micro-batches d, d + K, ...;
// pipelined: each passes the parts in turn; serial: all on the first device,
// the paper's way. Returns by micro-batch the task after which it is there.
// `last` holds by stage the last task of the device's list so far, -1 for none,
// and is moved on. Empty without a prefix.
std::vector<int32_t> add_prefix(
    TaskGraph& graph,
    const planner::StepCosts& costs,
    bool serial,
    const Devices& devices,
    std::vector<int32_t>& last);

// Whether the frozen layers run in the pipeline's gaps, for the next step: the
// costs place them so, or the options say so.
bool fills_gaps(const planner::StepCosts& costs, const StepOptions& options);

// Of one micro-batch, over all frozen layers.
int64_t prefix_per_microbatch_ns(const planner::StepCosts& costs);

}  // namespace pipetransformer::simulator
