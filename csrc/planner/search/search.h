// The search for the plan with the shortest step at a constant global batch,
// within each device's memory: over K, R, M, cuts, schedule, placement of the
// prefix and cache tier.
//
// Pure and deterministic: no clock, no randomness, int64 decisions.
// Thread-safe if `simulate` is.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "planner/search/candidates.h"
#include "planner/search/refusals.h"

namespace pipetransformer::planner {

// What the simulator says of a step.
struct Simulated {
  int64_t step_ns = 0;  // at least lower_bound_ns of the costs
  double bubble_fraction = 0;
};
using Simulate = std::function<Simulated(const StepCosts&)>;

struct SearchResult {
  // At most 8, best first, by simulated time; empty: nothing fits.
  std::vector<Candidate> candidates;
  // No other cuts, K, M, schedule or tier of those allowed simulate faster:
  // all were bounded or simulated. False: too many cuts for that.
  bool exhaustive = false;
  std::vector<Refusal> refusals;  // one per infeasible K
};

// Throws std::invalid_argument (see check).
SearchResult search(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Simulate& simulate);

}  // namespace pipetransformer::planner
