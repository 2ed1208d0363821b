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

#include "planner/costs/span_cost.h"

namespace pipetransformer::planner {

using Cuts = std::vector<int64_t>;

// Every stage must satisfy cost.stage(begin, end) <= cap. Holds a reference:
// the cost must outlive the limit.
struct Limit {
  std::reference_wrapper<const SpanCost> cost;
  int64_t cap;
};

// Cost of a stage that depends on its position: stage k of K costs
// fixed.stage(begin, end) + counts[k] * repeated.stage(begin, end). Memory of
// schedules that keep fewer micro-batches on later stages. Both costs add their
// charges. Holds references.
struct StageCost {
  std::reference_wrapper<const SpanCost> fixed;
  std::reference_wrapper<const SpanCost> repeated;
  std::vector<int64_t> counts;  // K entries, not negative

  int64_t stage(int64_t index, int64_t begin, int64_t end) const {
    return fixed.get().stage(begin, end) +
           counts[static_cast<std::size_t>(index)] *
               repeated.get().stage(begin, end);
  }
};

// Every stage k must satisfy cost.stage(k, begin, end) <= cap.
struct StageLimit {
  StageCost cost;
  int64_t cap;
};

// Cost of a stage as any function of it, not negative, that does not grow with
// `begin` nor fall with `end`.
using StageFunction = std::function<int64_t(int64_t begin, int64_t end)>;

struct MinMax {
  int64_t value;  // the largest stage
  Cuts cuts;
};

// What a partition may do.
struct Rules {
  std::vector<char> cut_allowed;  // n + 1 entries, the ends are ignored
  std::vector<Limit> limits = {};
  std::vector<StageLimit> stage_limits = {};  // each with K counts
};

// The lexicographically smallest cuts within all limits, nullopt if none are.
std::optional<Cuts> cuts_within(const Rules& rules, int64_t num_stages);

// The smallest possible largest stage of `cost` under `rules`, by bisection;
// nullopt if no partition satisfies the rules. See Note [Moving caps].
std::optional<MinMax>
min_max(const SpanCost& cost, const Rules& rules, int64_t num_stages);

// The same for a cost with one count per stage.
std::optional<MinMax>
min_max(const StageCost& cost, const Rules& rules, int64_t num_stages);

// What the largest stage can not be below: the largest layer, and the mean.
int64_t least_possible(const SpanCost& cost, int64_t num_stages);

}  // namespace pipetransformer::planner
