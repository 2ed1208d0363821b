// The frozen layers: where they run, what they cost per step and per device,
// and what a cache tier saves of it. Pure, int64, thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/costs/step_costs.h"
#include "planner/input/layer_profile.h"
#include "planner/input/workload.h"
#include "planner/solvers/partition.h"

namespace pipetransformer::planner {

struct PrefixCosts {
  PrefixPlacement placement = PrefixPlacement::kNone;
  // As in StepCosts, misses of the cache alone.
  std::vector<int64_t> per_microbatch_ns;
  int64_t grain_ns = 0;  // filled: of the longest layer, per micro-batch
  int64_t copy_ns = 0;
  int64_t cache_read_ns = 0;
  int64_t cache_wait_ns = 0;
  // On every device: the weights it holds, and its part of a device cache.
  // Filled: and what the next step's outputs take, wherever they are.
  int64_t bytes = 0;
};

// Whether a plan may use the tier at all: the cluster has it, or names none
// (then the tiers are taken as large and free, as in a run without limits).
bool has_tier(const Cluster& cluster, CacheTier tier);

// Cuts of the frozen layers, at least one, into chunks: one for each device, or
// as many as can be made where these are fewer, since layers that share a
// parameter stay together; so that the slowest is as fast as possible with so
// many samples. Expects that the boundary separates no such layers.
Cuts prefix_cuts(
    const Profile& profile,
    int64_t boundary,
    int64_t samples,
    int64_t num_devices);

// Without frozen layers everything is zero and the placement kNone. Pipelined
// chunks are those of `prefix_cuts`; more devices than frozen layers leave some
// without a chunk.
PrefixCosts prefix_costs(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape,
    PrefixPlacement placement,
    CacheTier tier);

// Time of the frozen prefix before the first forward: of the device with the
// most micro-batches, or of chunks that micro-batches pass in turn; 0 where it
// fills gaps. `prefix_ns` as in StepCosts.
int64_t prefix_phase_ns(
    PrefixPlacement placement,
    const std::vector<int64_t>& prefix_ns,
    int64_t num_devices,
    int64_t num_microbatches);

}  // namespace pipetransformer::planner
