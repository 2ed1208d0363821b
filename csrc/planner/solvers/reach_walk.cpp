// The greedy walk of Note [Moving caps].
#include <algorithm>

#include "planner/solvers/reach.h"

namespace pipetransformer::planner {

Reach::Probe Reach::probe_greedily(const Test& watched) {
  next_cap_ = kNoCap;
  reached_.clear();
  for (const int64_t position : {int64_t{0}, num_layers_}) {
    if (!may_cut(position)) {
      note_charges(&watched, position);
      return {false, next_cap_};
    }
  }
  int64_t begin = 0;
  int64_t largest = 0;
  for (int64_t k = 0; k < num_stages_ && begin < num_layers_; ++k) {
    const int64_t edge =
        furthest(begin, [&](int64_t end) { return fits(k, begin, end); });
    if (edge < num_layers_) {
      note(&watched, span_of(watched, k, begin, edge + 1));
    }
    int64_t end = latest_cut_[static_cast<std::size_t>(edge)];
    while (end > begin && !may_cut(end)) {
      note_charges(&watched, end);
      end = latest_cut_[static_cast<std::size_t>(end) - 1];
    }
    if (end > begin) {
      largest = std::max(largest, whole_of(watched, k, begin, end));
      begin = end;
    } else if (!by_position_) {
      return {false, next_cap_};
    }
    reached_.push_back(begin);
  }
  if (begin < num_layers_) {
    return {false, next_cap_};
  }
  if (static_cast<int64_t>(reached_.size()) == num_stages_ && !by_position_) {
    return {true, largest};
  }
  return move_cuts(watched, largest);
}

// After a walk that left stages empty: whether cuts can be moved left until
// none is, which takes as many segments up to each cut as there are stages.
Reach::Probe Reach::move_cuts(const Test& watched, int64_t largest) {
  int64_t num_cuts = 0;
  std::size_t m = 0;
  for (int64_t j = 0; j <= num_layers_; ++j) {
    if (j > 0 && latest_cut_[static_cast<std::size_t>(j)] == j) {
      if (may_cut(j)) {
        ++num_cuts;
        // The cut may move here: what its copies take counts.
        if (overlapped(watched)) {
          largest = std::max(largest, watched.cost->exit(j));
          largest =
              std::max(largest, j == num_layers_ ? 0 : watched.cost->entry(j));
        }
      } else {
        note_charges(&watched, j);
      }
    }
    for (; m < reached_.size() && reached_[m] == j; ++m) {
      if (num_cuts <= static_cast<int64_t>(m)) {
        return {false, next_cap_};
      }
    }
  }
  const bool enough = num_cuts >= num_stages_;
  return {enough, enough ? largest : next_cap_};
}

}  // namespace pipetransformer::planner
