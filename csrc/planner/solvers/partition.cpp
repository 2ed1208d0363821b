#include "planner/solvers/partition.h"

#include <algorithm>

#include "planner/solvers/reach.h"

namespace pipetransformer::planner {

namespace {

// `low`: a lower bound of the largest stage.
std::optional<MinMax> least(Reach& reach, Reach::Handle watched, int64_t low) {
  const Reach::Probe any = reach.probe(watched);
  if (!any.feasible) {
    return std::nullopt;
  }
  const int64_t value = reach.least_cap(watched, low, any.value);
  return MinMax{value, reach.first_cuts().value()};
}

}  // namespace

int64_t least_possible(const SpanCost& cost, int64_t num_stages) {
  const int64_t n = cost.num_layers();
  int64_t low = (cost.layers(0, n) + num_stages - 1) / num_stages;
  for (int64_t i = 0; i < n; ++i) {
    low = std::max(low, cost.layers(i, i + 1));
  }
  return low;
}

std::optional<Cuts> cuts_within(const Rules& rules, int64_t num_stages) {
  return Reach(rules, num_stages).first_cuts();
}

std::optional<MinMax>
min_max(const SpanCost& cost, const Rules& rules, int64_t num_stages) {
  if (num_stages < 1) {
    return std::nullopt;
  }
  Reach reach(rules, num_stages);
  const Reach::Handle watched = reach.watch(cost);
  return least(reach, watched, least_possible(cost, num_stages));
}

std::optional<MinMax>
min_max(const StageCost& cost, const Rules& rules, int64_t num_stages) {
  Reach reach(rules, num_stages);
  const Reach::Handle watched = reach.watch(cost);
  return least(reach, watched, 0);
}

}  // namespace pipetransformer::planner
