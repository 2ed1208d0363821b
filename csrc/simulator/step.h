// A training step on simulated devices: how long it takes, what stands still,
// what it keeps in memory, and when each operation runs.
//
// Pure functions, int64 ns and bytes, thread-safe. Source: the operations are
// those of planner/schedule/schedules.h, which the pipe runs too.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/costs/step_costs.h"
#include "planner/schedule/schedule.h"
#include "simulator/devices.h"
#include "simulator/step_options.h"
#include "simulator/task_graph.h"

namespace pipetransformer::simulator {

struct Event {
  TaskKind kind = TaskKind::kForward;
  ResourceKind resource = ResourceKind::kCompute;
  int32_t replica = 0;
  int32_t stage = 0;
  int32_t microbatch = -1;  // -1: no single one
  Direction direction = Direction::kNone;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// One replica's pipeline.
struct PipelineResult {
  int64_t begin_ns = 0;                // first F, after the prefix
  int64_t end_ns = 0;                  // last operation of the schedule
  std::vector<int64_t> stage_busy_ns;  // in operations of the schedule
  std::vector<int64_t> peak_bytes;
  // Share of K * (end - begin) in which stages run none of their operations.
  double bubble_fraction = 0;
};

// Of batches that share an optimizer step all but `step_ns` is of the last one,
// whose gradients are reduced.
struct StepResult {
  int64_t step_ns = 0;  // mean of those batches
  int64_t last_step_ns = 0;
  int64_t exposed_all_reduce_ns = 0;      // after the last operation
  std::vector<PipelineResult> pipelines;  // by replica
  std::vector<Event> timeline;  // by begin; empty unless it is to be kept
};

// The order of a whole step's operations, as the runtime runs them.
planner::Schedule schedule_of(const planner::StepCosts& costs);

// One replica; others are like it. Throws std::invalid_argument for what
// `check` of step_tasks.h refuses.
StepResult simulate_step(const planner::StepCosts& costs, bool keep_timeline);

// Replicas on devices of different speed: their all-reduces join them and wait
// for the slowest. Replicas that are equal need to be there once.
StepResult simulate_replicas(
    const planner::StepCosts& costs,
    const std::vector<Permille>& replicas,
    const StepOptions& options);

// The same with a given order of operations in place of the schedule's. Throws
// std::invalid_argument also when it has another number of stages.
StepResult simulate_lists(
    const planner::StepCosts& costs,
    const planner::Schedule& schedule,
    const std::vector<Permille>& replicas,
    const StepOptions& options);

}  // namespace pipetransformer::simulator
