#include "planner/staircase.h"

#include <algorithm>
#include <utility>

namespace pipetransformer::planner {

namespace {

std::optional<MinMax> min_max_with(
    const SpanCost& cost,
    const Rules& rules,
    Limit extra,
    int64_t num_stages) {
  Rules limited = rules;
  limited.limits.push_back(extra);
  return min_max(cost, limited, num_stages);
}

}  // namespace

std::vector<StaircasePoint> staircase(
    const SpanCost& forward,
    const SpanCost& backward,
    const Rules& rules,
    int64_t num_stages) {
  std::vector<StaircasePoint> points;
  std::optional<MinMax> first = min_max(forward, rules, num_stages);
  if (!first) {
    return points;
  }
  const int64_t least_backward = min_max(backward, rules, num_stages)->value;
  int64_t forward_ns = first->value;
  int64_t best = forward_ns + largest_stage(backward, first->cuts);
  while (forward_ns + least_backward <= best) {
    // Exists: the cuts that gave forward_ns satisfy the limit.
    MinMax step =
        *min_max_with(backward, rules, {forward, forward_ns}, num_stages);
    const int64_t backward_ns = step.value;
    best = std::min(best, forward_ns + backward_ns);
    points.push_back({forward_ns, backward_ns, std::move(step.cuts)});
    if (backward_ns == least_backward) {
      break;
    }
    // Exists: least_backward < backward_ns is reachable.
    forward_ns =
        min_max_with(forward, rules, {backward, backward_ns - 1}, num_stages)
            ->value;
  }
  return points;
}

}  // namespace pipetransformer::planner
