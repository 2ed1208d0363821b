#include "planner/best_cuts.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "planner/cheapest_cuts.h"
#include "planner/labels.h"
#include "planner/reach.h"
#include "planner/staircase.h"

namespace pipetransformer::planner {

namespace {

// Of the points that may hold the optimum, how many are tried to bound it.
constexpr std::size_t kMostStarts = 4;

// The costs of all inner cuts that the rules allow.
std::vector<int64_t>
inner_costs(const CutObjective& objective, const Rules& rules) {
  std::vector<int64_t> costs;
  for (std::size_t j = 1; j + 1 < rules.cut_allowed.size(); ++j) {
    if (rules.cut_allowed[j] != 0) {
      costs.push_back(objective.cut_ns.empty() ? 0 : objective.cut_ns[j]);
    }
  }
  return costs;
}

// Looks for the best cuts between bounds; see Note [Bounds].
class Search {
 public:
  Search(const CutObjective& objective, const Rules& rules, int64_t num_stages)
      : objective_(objective),
        rules_(rules),
        num_stages_(num_stages),
        cut_ns_(
            objective.cut_ns.empty()
                ? std::vector<int64_t>(rules.cut_allowed.size(), 0)
                : objective.cut_ns) {}

  std::optional<BestCuts> best(int64_t cutoff) {
    const std::vector<StaircasePoint> points = stairs();
    if (points.empty()) {
      return std::nullopt;
    }
    const std::vector<int64_t> costs = inner_costs(objective_, rules_);
    const bool alike =
        std::adjacent_find(costs.begin(), costs.end(), std::not_equal_to<>()) ==
        costs.end();
    if (alike && !objective_.exposed_ns) {
      return within(cutoff, first_of_best(points));
    }
    find_floor(points, costs);
    if (value_of(objective_, floor_) > cutoff) {
      return std::nullopt;
    }
    BestCuts known = start_from(points);
    const int64_t at_most = std::min(cutoff, known.value);
    Reach reach(rules_, num_stages_);
    cap(reach, caps(at_most));
    if (!reach.tabulate()) {
      return std::nullopt;  // possible only below `known`
    }
    const BestLabels best = best_labels(objective_, reach, at_most);
    known.exact = best.exact;
    if (best.labels.empty()) {
      return within(cutoff, std::move(known));
    }
    return first_of(best);
  }

 private:
  bool counts_stages() const {
    return objective_.repeats > 0;
  }

  static std::optional<BestCuts> within(int64_t cutoff, BestCuts found) {
    return found.value <= cutoff ? std::optional<BestCuts>(std::move(found))
                                 : std::nullopt;
  }

  // Points with the least largest stages; one alone where there is nothing to
  // trade.
  std::vector<StaircasePoint> stairs() const {
    if (!counts_stages()) {
      auto cuts = cuts_within(rules_, num_stages_);
      return cuts ? std::vector<StaircasePoint>{{0, 0, *std::move(cuts)}}
                  : std::vector<StaircasePoint>{};
    }
    if (objective_.backward == nullptr) {
      auto found = min_max(objective_.forward, rules_, num_stages_);
      return found ? std::vector<StaircasePoint>{{found->value, 0, found->cuts}}
                   : std::vector<StaircasePoint>{};
    }
    return staircase(
        objective_.forward, *objective_.backward, rules_, num_stages_);
  }

  BestCuts first_of_best(const std::vector<StaircasePoint>& points) const {
    std::optional<BestCuts> best;
    for (const StaircasePoint& point : points) {
      const int64_t value = value_of(objective_, point.cuts);
      if (!best ||
          std::tie(value, point.cuts) < std::tie(best->value, best->cuts)) {
        best = BestCuts{value, point.cuts, true};
      }
    }
    return *std::move(best);
  }

  void find_floor(
      const std::vector<StaircasePoint>& points,
      std::vector<int64_t> costs) {
    int64_t sum = Reach::kNoCap;
    for (const StaircasePoint& point : points) {
      sum = std::min(sum, point.forward_ns + point.backward_ns);
    }
    least_forward_ = points.front().forward_ns;
    if (counts_stages() && objective_.backward != nullptr) {
      least_backward_ =
          min_max(*objective_.backward, rules_, num_stages_)->value;
    }
    floor_.forward = sum;
    const auto inner = static_cast<std::ptrdiff_t>(num_stages_) - 1;
    std::nth_element(
        costs.begin(),
        costs.begin() + std::max<std::ptrdiff_t>(0, inner - 1),
        costs.end());
    for (std::ptrdiff_t k = 0; k < inner; ++k) {
      floor_.cut_total += costs[static_cast<std::size_t>(k)];
    }
    if (objective_.exposed_ns) {
      Reach reach(rules_, num_stages_);
      floor_.exposed = least_exposed(reach);
    }
  }

  // Under the caps of `reach`, under which a partition exists; capped to it.
  int64_t least_exposed(Reach& reach) const {
    const Reach::Handle exposed = reach.watch(objective_.exposed_ns);
    return reach.least_cap(exposed, 0, reach.probe(exposed).value);
  }

  // Caps on the terms; those that do not count are left alone.
  void cap(Reach& reach, const Label& most) const {
    if (counts_stages()) {
      reach.set_cap(reach.watch(objective_.forward.get()), most.forward);
      if (objective_.backward != nullptr) {
        reach.set_cap(reach.watch(*objective_.backward), most.backward);
      }
    }
    if (objective_.exposed_ns) {
      reach.set_cap(reach.watch(objective_.exposed_ns), most.exposed);
    }
  }

  // What each term can come to at most in a partition of that value.
  Label caps(int64_t at_most) const {
    const int64_t slack = at_most - value_of(objective_, floor_);
    Label most;
    most.exposed = floor_.exposed + slack;
    if (counts_stages()) {
      const int64_t sum = floor_.forward + slack / objective_.repeats;
      most.forward = sum - least_backward_;
      most.backward = sum - least_forward_;
    }
    return most;
  }

  // Good cuts to begin with: for the most promising points those with the
  // least exposed all-reduce, then the cheapest.
  BestCuts start_from(std::vector<StaircasePoint> points) const {
    BestCuts known = first_of_best(points);
    std::stable_sort(
        points.begin(),
        points.end(),
        [](const StaircasePoint& a, const StaircasePoint& b) {
          return a.forward_ns + a.backward_ns < b.forward_ns + b.backward_ns;
        });
    points.resize(std::min(points.size(), kMostStarts));
    for (const StaircasePoint& point : points) {
      Reach reach(rules_, num_stages_);
      cap(reach,
          {point.forward_ns, point.backward_ns, Reach::kNoCap, Reach::kNoCap});
      if (objective_.exposed_ns) {
        least_exposed(reach);
      }
      Cuts cuts = cheapest_cuts(cut_ns_, reach).value().cuts;
      const int64_t value = value_of(objective_, cuts);
      if (value < known.value) {
        known = {value, std::move(cuts), true};
      }
    }
    return known;
  }

  BestCuts first_of(const BestLabels& best) const {
    std::optional<Cuts> first;
    for (const Label& label : best.labels) {
      Reach reach(rules_, num_stages_);
      cap(reach, label);
      Cuts cuts = cheapest_cuts(cut_ns_, reach).value().cuts;
      if (!first || cuts < *first) {
        first = std::move(cuts);
      }
    }
    const int64_t value = value_of(objective_, best.labels.front());
    return {value, *std::move(first), best.exact};
  }

  const CutObjective& objective_;
  const Rules& rules_;
  const int64_t num_stages_;
  const std::vector<int64_t> cut_ns_;
  Label floor_;  // lower bounds; `forward` is that of forward + backward
  int64_t least_forward_ = 0;
  int64_t least_backward_ = 0;
};

}  // namespace

int64_t value_of(const CutObjective& objective, const Cuts& cuts) {
  Label label;
  label.forward = largest_stage(objective.forward, cuts);
  if (objective.backward != nullptr) {
    label.backward = largest_stage(*objective.backward, cuts);
  }
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    if (k > 0 && !objective.cut_ns.empty()) {
      label.cut_total += objective.cut_ns[static_cast<std::size_t>(cuts[k])];
    }
    if (objective.exposed_ns) {
      label.exposed =
          std::max(label.exposed, objective.exposed_ns(cuts[k], cuts[k + 1]));
    }
  }
  return value_of(objective, label);
}

// Note [Bounds]
// Each term alone has a least value, and forward + backward together one from
// the staircase: their sum bounds the optimum from below, a few good cuts bound
// it from above. The difference is all that a single term may exceed its least
// value by, which caps it: near the optimum few begins per stage are left, and
// only those are walked (best_labels).
std::optional<BestCuts> best_cuts(
    const CutObjective& objective,
    const Rules& rules,
    int64_t num_stages,
    int64_t cutoff) {
  if (num_stages < 1) {
    return std::nullopt;
  }
  return Search(objective, rules, num_stages).best(cutoff);
}

}  // namespace pipetransformer::planner
