// Bytes on each stage's device along the order of its operations. Pure;
// thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/costs/step_costs.h"
#include "planner/schedule/schedule.h"

namespace pipetransformer::simulator {

// Largest number of bytes by stage: its state, and what micro-batches keep,
// together (`shared_bytes`, throughout) and each.
// F keeps `kept_bytes` until B or I ends; `recomputed_bytes` are there from R,
// or from F where there is no R, until then; from I to the end of W it is
// `kept_for_weights_bytes`. A micro-batch without backward keeps its bytes
// while F runs. `summed_gradient_bytes` are there from the end of the first B
// or W on, `passing_gradient_bytes` at the end of each later one. One device
// runs one operation at a time, so times play no part.
std::vector<int64_t>
peak_bytes(const planner::StepCosts& costs, const planner::Schedule& schedule);

}  // namespace pipetransformer::simulator
