// Device memory of the stages: parameters, gradients, optimizer state, and the
// activations of the micro-batches that a schedule keeps at once. Pure, int64
// bytes, thread-safe. Layers are counted from the boundary.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/costs/span_cost.h"
#include "planner/costs/step_costs.h"
#include "planner/input/layer_profile.h"
#include "planner/input/workload.h"

namespace pipetransformer::planner {

// Stage k takes fixed + base + counts[k] * per_microbatch.
struct StageMemory {
  int64_t fixed = 0;  // context and prefix, on every device
  // State, and what a recomputed micro-batch takes; on entry, what waits for
  // the first stage.
  SpanCost base;
  SpanCost per_microbatch;
  std::vector<int64_t> counts;

  int64_t stage(int64_t index, int64_t begin, int64_t end) const {
    return fixed + base.stage(begin, end) +
           counts[static_cast<std::size_t>(index)] *
               per_microbatch.stage(begin, end);
  }
};

// Largest number of micro-batches whose activations stage k keeps until their
// B or I. GPipe: all M; 1F1B and ZB-H1: min(M, K - k).
std::vector<int64_t> in_flight(ScheduleKind schedule, const Shape& shape);

// See Note [What a stage keeps].
StageMemory stage_memory(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape,
    ScheduleKind schedule,
    int64_t prefix_bytes);

// Bytes that one stage adds per micro-batch, for the simulator.
struct KeptBytes {
  int64_t kept = 0;         // from F to the end of B or I
  int64_t recomputed = 0;   // from R to the end of B or I
  int64_t for_weights = 0;  // from I to W
};
KeptBytes kept_bytes(
    const Profile& profile,
    const Workload& workload,
    const Shape& shape,
    int64_t begin,
    int64_t end);

// Parameters, gradients and optimizer state of the layers [begin, end).
int64_t state_bytes(
    const Profile& profile,
    const Cluster& cluster,
    int64_t boundary,
    int64_t begin,
    int64_t end);

}  // namespace pipetransformer::planner
