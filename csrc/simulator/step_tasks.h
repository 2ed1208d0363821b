// The tasks of one training step: replicas' pipelines, their all-reduces and
// the optimizer. Pure; thread-safe.
#pragma once

#include <vector>

#include "planner/costs/step_costs.h"
#include "planner/schedule/schedule.h"
#include "simulator/devices.h"
#include "simulator/replay.h"
#include "simulator/step_options.h"
#include "simulator/task_graph.h"

namespace pipetransformer::simulator {

struct StepTasks {
  TaskGraph graph;
  FillWork fill;                 // where the prefix fills gaps
  std::vector<Devices> devices;  // by replica
};

// Throws std::invalid_argument, naming the field, for costs that are negative
// or too large, stages without a backward behind stages with one, a prefix that
// has not the entries its placement needs, more than 2^22 operations of a kind,
// and replicas whose speeds are not one per stage; where the prefix fills gaps
// more than one replica.
void check(
    const planner::StepCosts& costs,
    const std::vector<Permille>& replicas,
    const StepOptions& options);

// One pipeline for each entry of `replicas`, joined by all-reduces.
StepTasks tasks_of_step(
    const planner::StepCosts& costs,
    const planner::Schedule& schedule,
    const std::vector<Permille>& replicas,
    const StepOptions& options);

}  // namespace pipetransformer::simulator
