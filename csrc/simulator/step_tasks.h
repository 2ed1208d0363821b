// The tasks of one training step: the schedule's operations on the devices,
// copies between them, the frozen prefix before them, all-reduces, cache
// traffic and the optimizer. Pure; thread-safe.
//
// A device runs its operations in the order of its list; an operation that
// needs a value of another stage waits for the copy that brings it.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/schedule.h"
#include "planner/step_costs.h"
#include "simulator/replay.h"
#include "simulator/step_options.h"
#include "simulator/task_graph.h"

namespace pipetransformer::simulator {

// Tasks of the step, and what fills the gaps (PrefixMode::kFilled).
struct StepTasks {
  TaskGraph graph;
  FillWork fill;
  // By replica and stage: the compute resource.
  std::vector<std::vector<int32_t>> compute;
};

// Throws std::invalid_argument, naming the field, for costs that are negative
// or too large, stages without a backward behind stages with one, a prefix that
// has not the entries its placement needs, and more than 2^24 operations.
void check(const planner::StepCosts& costs, const StepOptions& options);

// One pipeline for each entry; all-reduces join them. The schedule is that of
// every replica, with the replicas' number of stages.
StepTasks tasks_of_step(
    const std::vector<planner::StepCosts>& replicas,
    const planner::Schedule& schedule,
    const StepOptions& options);

}  // namespace pipetransformer::simulator
