// From layers to stages: what a step costs once K, R, M, schedule, prefix and
// cuts are chosen. Pure, thread-safe.
#pragma once

#include "planner/costs/layer_costs.h"
#include "planner/costs/memory.h"
#include "planner/costs/prefix.h"
#include "planner/costs/step_costs.h"
#include "planner/input/layer_profile.h"
#include "planner/input/workload.h"
#include "planner/solvers/partition.h"

namespace pipetransformer::planner {

// One way to run a step.
struct Choice {
  Shape shape;
  ScheduleKind schedule = ScheduleKind::kGPipe;
  PrefixPlacement prefix = PrefixPlacement::kNone;
  CacheTier cache = CacheTier::kNone;
  Cuts cuts;  // layer indices of the model, from the boundary to L
};

// Costs of one shape under one schedule and prefix; cuts vary. Holds
// references: profile, cluster and workload must outlive it.
class StepModel {
 public:
  StepModel(
      const Profile& profile,
      const Cluster& cluster,
      const Workload& workload,
      const Shape& shape,
      ScheduleKind schedule,
      PrefixPlacement prefix,
      CacheTier cache);

  const Workload& workload() const {
    return workload_;
  }
  const LayerCosts& layers() const {
    return layers_;
  }
  const PrefixCosts& prefix() const {
    return prefix_;
  }
  const StageMemory& memory() const {
    return memory_;
  }
  // Forward, backward (recomputation included) and both of a stage per
  // micro-batch. Serial copies are charged to both of their stages.
  const SpanCost& forward() const {
    return forward_;
  }
  const SpanCost& backward() const {
    return backward_;
  }
  const SpanCost& both() const {
    return both_;
  }
  const SpanCost& gradient_bytes() const {
    return gradient_bytes_;
  }
  // What a cut at each boundary adds to a step once: its copies, in both
  // directions; serial ones to both of its stages.
  Column cut_ns() const;
  Column backward_cut_ns() const;  // of it, those of gradients
  // `cuts` counted from the boundary.
  StepCosts step(const Cuts& cuts) const;

 private:
  Column once_per_cut(const Column& copies) const;
  int64_t delivered_all_reduce_ns(int64_t begin, int64_t end) const;

  const Profile& profile_;
  const Cluster& cluster_;
  const Workload& workload_;
  const Shape shape_;
  const ScheduleKind schedule_;
  const LayerCosts layers_;
  const PrefixCosts prefix_;
  const StageMemory memory_;
  const bool serial_;
  SpanCost forward_;
  SpanCost input_grad_;
  SpanCost weight_grad_;
  SpanCost gradient_bytes_;
  SpanCost backward_;
  SpanCost both_;
};

// Costs of a step for a complete choice.
StepCosts step_costs(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Choice& choice);

}  // namespace pipetransformer::planner
