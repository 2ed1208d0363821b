// Exact minimum of max(forward) + max(backward) over contiguous stages: the
// part of a GPipe step that the cuts decide. Pure, thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/solvers/partition.h"

namespace pipetransformer::planner {

struct StaircasePoint {
  int64_t forward_ns;   // largest forward of a stage
  int64_t backward_ns;  // largest backward of a stage
  Cuts cuts;
};

// Walks the Pareto front of (max forward, max backward) upwards in forward, and
// ends where no better or equal sum can follow: the best sum is among the
// points returned. Empty when no partition satisfies the rules.
std::vector<StaircasePoint> staircase(
    const SpanCost& forward,
    const SpanCost& backward,
    const Rules& rules,
    int64_t num_stages);

}  // namespace pipetransformer::planner
