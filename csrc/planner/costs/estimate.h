// Closed forms for the time of a step: an estimate that ranks, and a bound that
// no run stays below. The simulator decides between what they leave. Pure,
// thread-safe, O(K).
// Source: GPipe, all forwards before all backwards, over heterogeneous stages:
// sum(f + b) + (M - 1)(max f + max b) is exact; for 1F1B it is sum s +
// (M - 1) max s (neither bound nor exact), with s = f + b.
#pragma once

#include <cstdint>

#include "planner/costs/step_costs.h"

namespace pipetransformer::planner {

int64_t estimate_ns(const StepCosts& costs);

// At most the simulated time. See Note [What no step stays below].
int64_t lower_bound_ns(const StepCosts& costs);

}  // namespace pipetransformer::planner
