// One replica's tasks: cache reads, the frozen prefix, then the operations of
// the schedule and the copies between them. Pure; thread-safe.
//
// A device runs its operations in the order of its list; one that needs a value
// of another stage waits for the copy that brings it.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/costs/step_costs.h"
#include "planner/schedule/schedule.h"
#include "simulator/devices.h"
#include "simulator/step_options.h"
#include "simulator/task_graph.h"

namespace pipetransformer::simulator {

struct PipelineTasks {
  Devices devices;
  std::vector<int32_t> last;  // by stage: last task of its list, -1 for none
};

PipelineTasks add_pipeline(
    TaskGraph& graph,
    const planner::StepCosts& costs,
    const planner::Schedule& schedule,
    const StepOptions& options,
    int32_t replica,
    const Permille& permille);

}  // namespace pipetransformer::simulator
