// A training step on simulated devices: how long it takes, what stands still,
// what it keeps in memory, and when each operation runs.
//
// Pure functions, int64 ns and bytes, thread-safe. Source: the operations are
// those of planner/schedules.h, which the pipe runs too.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "planner/schedule.h"
#include "planner/step_costs.h"
#include "simulator/step_options.h"
#include "simulator/task_graph.h"

namespace pipetransformer::simulator {

struct Event {
  TaskKind kind = TaskKind::kForward;
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

struct StepResult {
  int64_t step_ns = 0;
  int64_t exposed_all_reduce_ns = 0;      // after the last operation
  std::vector<PipelineResult> pipelines;  // by replica
  std::vector<Event> timeline;  // by begin; empty unless it is to be kept
};

// The operations of a whole step as the runtime orders them.
planner::Schedule schedule_of(const planner::StepCosts& costs);

// One replica; others are like it. Throws std::invalid_argument for what
// `check` of step_tasks.h refuses.
StepResult
simulate_step(const planner::StepCosts& costs, const StepOptions& options);
StepResult simulate_step(const planner::StepCosts& costs, bool keep_timeline);

// Replicas that differ, in speed only: they are joined by their all-reduces,
// which wait for the slowest. Equal ones need to be there once. Throws
// std::invalid_argument also when schedule, stages or micro-batches differ, or
// for PrefixMode::kFilled with more than one.
StepResult simulate_replicas(
    const std::vector<planner::StepCosts>& replicas,
    const StepOptions& options);

// The same with a given order of operations in place of the schedule's.
StepResult simulate_lists(
    const std::vector<planner::StepCosts>& replicas,
    const planner::Schedule& schedule,
    const StepOptions& options);

}  // namespace pipetransformer::simulator
