// Device memory of the stages: parameters, gradients, optimizer state, and the
// activations of the micro-batches that a schedule keeps at once. Pure, int64
// bytes, thread-safe. Layers are counted from the boundary.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/costs/span_cost.h"
#include "planner/costs/step_costs.h"
#include "planner/input/layer_profile.h"
#include "planner/input/workload.h"

namespace pipetransformer::planner {

// At this point of a step stage k takes base + counts[k] * per_microbatch.
struct MemoryPoint {
  // State, what all micro-batches share, what a recomputed one takes, and
  // further gradients.
  SpanCost base;
  std::vector<int64_t> counts;
};

// Stage k takes what it takes at the point where that is most.
struct StageMemory {
  int64_t fixed = 0;  // context and prefix, on every device
  SpanCost per_microbatch;
  std::vector<MemoryPoint> points;  // at least one

  int64_t stage(int64_t index, int64_t begin, int64_t end) const {
    const int64_t repeated = per_microbatch.stage(begin, end);
    int64_t most = 0;
    for (const MemoryPoint& point : points) {
      most = std::max(
          most,
          point.base.stage(begin, end) +
              point.counts[static_cast<std::size_t>(index)] * repeated);
    }
    return fixed + most;
  }
};

// Largest number of micro-batches whose activations stage k keeps until their
// B or I. GPipe: all M; 1F1B and ZB-H1: min(M, K - k).
std::vector<int64_t> in_flight(ScheduleKind schedule, const Shape& shape);

// See Note [What a stage keeps] and Note [Gradients beside gradients].
StageMemory stage_memory(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape,
    ScheduleKind schedule,
    int64_t prefix_bytes);

// Bytes that one stage adds per micro-batch, and once, for the simulator.
struct KeptBytes {
  int64_t kept = 0;         // from F to the end of B or I
  int64_t recomputed = 0;   // from R to the end of B or I
  int64_t for_weights = 0;  // from I to W
  int64_t shared = 0;       // once, for all micro-batches
};
KeptBytes kept_bytes(
    const Profile& profile,
    const Workload& workload,
    const Shape& shape,
    int64_t begin,
    int64_t end);

// Gradients of the layers [begin, end) that are there beside those that the
// state counts.
struct FurtherGradients {
  int64_t sums = 0;     // from the first backward on
  int64_t passing = 0;  // as each later backward ends
};
FurtherGradients further_gradients(
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
