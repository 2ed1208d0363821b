// Predicted time of one GPipe step: what each stage costs per micro-batch, the
// frozen prefix, boundary copies and the exposed all-reduce.
//
// Pure functions of profile, cluster and shape, int64 ns; thread-safe. Layers
// are counted from the boundary here: index 0 is the first active layer.
// Source: GPipe makespan over heterogeneous stages, all forwards before all
// backwards: T = sum(f+b+w) + (M-1)(max f + max(b+w)), plus each copy once per
// direction.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/layer_profile.h"
#include "planner/partition.h"
#include "planner/span_cost.h"

namespace pipetransformer::planner {

enum class Checkpoint { kNever, kExceptLast, kAlways };

// K, R and M of a plan.
struct Shape {
  int64_t num_stages = 1;
  int64_t num_replicas = 1;
  int64_t num_microbatches = 1;

  bool operator==(const Shape&) const = default;
};

// What stays fixed while shapes are compared.
struct Workload {
  int64_t global_batch = 1;
  int64_t boundary = 0;  // frozen layers
  Checkpoint checkpoint = Checkpoint::kNever;
  bool prefix_cached = false;  // the prefix costs no time, still its weights
};

// The replica and micro-batch with the most rows decide the step.
int64_t samples_per_replica(int64_t global_batch, const Shape& shape);
int64_t samples_per_microbatch(int64_t global_batch, const Shape& shape);

// Number of leading active layers that no gradient passes: they hold no
// trainable parameter and nothing before them does.
int64_t num_forward_only(const Profile& profile, int64_t boundary);

bool recomputes(Checkpoint checkpoint, const Shape& shape);

class StepCost {
 public:
  StepCost(
      const Profile& profile,
      const Cluster& cluster,
      const Workload& workload,
      const Shape& shape);

  const SpanCost& forward() const {
    return forward_;  // per micro-batch, boundary copies included
  }
  const SpanCost& backward() const {
    return backward_;  // the same; recomputation included
  }
  // Predicted time of a step with these cuts.
  int64_t step_ns(const Cuts& cuts) const;

 private:
  int64_t exposed_all_reduce_ns(const Cuts& cuts) const;
  int64_t all_reduce_ns(int64_t bytes) const;

  const Cluster cluster_;
  const Shape shape_;
  SpanCost forward_;
  SpanCost backward_;
  SpanCost gradient_bytes_;
  int64_t prefix_ns_;
};

}  // namespace pipetransformer::planner
