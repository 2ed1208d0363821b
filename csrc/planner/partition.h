// Exact partition of a row of layers into K contiguous, non-empty stages.
//
// Pure functions over int64, thread-safe, no state. A stage is bounded by any
// number of limits (time, memory) and may only start where a cut is allowed.
// Cuts are K+1 increasing indices 0 .. n; among equally good ones the
// lexicographically smallest is returned, so ranks cannot disagree.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planner/span_cost.h"

namespace pipetransformer::planner {

using Cuts = std::vector<int64_t>;

// Every stage must satisfy cost.stage(begin, end) <= cap. Holds a reference:
// the cost must outlive the limit.
struct Limit {
  std::reference_wrapper<const SpanCost> cost;
  int64_t cap;
};

struct MinMax {
  int64_t value;  // the largest stage
  Cuts cuts;
};

// What a partition may do: `cut_allowed[j]` for 0 < j < n, and the limits.
struct Rules {
  std::vector<char> cut_allowed;  // n + 1 entries, the ends are ignored
  std::vector<Limit> limits;
};

// The lexicographically smallest cuts within all limits, nullopt if none are.
// See Note [Windowed reachability] for the cost.
std::optional<Cuts> cuts_within(const Rules& rules, int64_t num_stages);

// The smallest possible largest stage of `cost` under `rules`, by bisection;
// nullopt if no partition satisfies the rules.
std::optional<MinMax>
min_max(const SpanCost& cost, const Rules& rules, int64_t num_stages);

int64_t largest_stage(const SpanCost& cost, const Cuts& cuts);

}  // namespace pipetransformer::planner
