// What a search compares: every combination of K, R, M, schedule, placement of
// the prefix and cache tier it may choose, each with a bound that none of its
// cuts beats. Pure, thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/costs/step_model.h"
#include "planner/input/layer_profile.h"
#include "planner/search/request.h"

namespace pipetransformer::planner {

struct Variant {
  Shape shape;
  ScheduleKind schedule = ScheduleKind::kGPipe;
  PrefixPlacement prefix = PrefixPlacement::kNone;
  CacheTier cache = CacheTier::kNone;
  int64_t bound_ns = 0;
};

// By rising bound, then K, falling R, M, schedule, placement, tier. Variants
// whose micro-batches would get too few rows are left out; so are schedules
// that would do the same as another, and tiers that the cluster does not have.
std::vector<Variant> variants(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request);

}  // namespace pipetransformer::planner
