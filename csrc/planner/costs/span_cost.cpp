#include "planner/costs/span_cost.h"

#include <algorithm>
#include <utility>

namespace pipetransformer::planner {

namespace {

bool all_zero(const std::vector<int64_t>& values) {
  return std::all_of(
      values.begin(), values.end(), [](int64_t v) { return v == 0; });
}

}  // namespace

SpanCost::SpanCost(
    const std::vector<int64_t>& layer_costs,
    std::vector<int64_t> entry,
    std::vector<int64_t> exit,
    Charges charges)
    : charges_(charges),
      prefix_(layer_costs.size() + 1, 0),
      entry_(std::move(entry)),
      exit_(std::move(exit)) {
  for (std::size_t i = 0; i < layer_costs.size(); ++i) {
    prefix_[i + 1] = prefix_[i] + layer_costs[i];
  }
  left_ = prefix_;
  right_ = prefix_;
  if (all_zero(entry_) && all_zero(exit_)) {
    charges_ = Charges::kAdded;
  }
  if (charges_ == Charges::kOverlapped) {
    return;
  }
  for (std::size_t i = 0; i < prefix_.size(); ++i) {
    left_[i] -= entry_[i];
    right_[i] += exit_[i];
  }
  monotone_ = std::is_sorted(left_.begin(), left_.end()) &&
              std::is_sorted(right_.begin(), right_.end());
}

SpanCost::SpanCost(const std::vector<int64_t>& layer_costs)
    : SpanCost(
          layer_costs,
          std::vector<int64_t>(layer_costs.size() + 1, 0),
          std::vector<int64_t>(layer_costs.size() + 1, 0)) {}

}  // namespace pipetransformer::planner
