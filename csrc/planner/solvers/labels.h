// The best cuts by labels: partial cuts as vectors of what they cost, kept
// while no other at the same place is as good in everything. Internal to
// best_cuts.
#pragma once

#include <cstdint>
#include <optional>

#include "planner/solvers/best_cuts.h"
#include "planner/solvers/reach.h"

namespace pipetransformer::planner {

// The best cuts within the caps of `reach`, which must be tabulated, with a
// value up to `at_most`; nullopt if there are none. See Note [Labels].
std::optional<BestCuts> best_by_labels(
    const CutObjective& objective,
    const Reach& reach,
    int64_t at_most);

}  // namespace pipetransformer::planner
