#include "planner/solvers/best_cuts.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#include "planner/solvers/cheapest_cuts.h"
#include "planner/solvers/cut_terms.h"
#include "planner/solvers/labels.h"
#include "planner/solvers/reach.h"
#include "planner/solvers/staircase.h"

namespace pipetransformer::planner {

namespace {

using Wide = __int128;

// Of the points that may hold the optimum, how many are tried to bound it.
constexpr std::size_t kMostStarts = 4;

int64_t entry_or_zero(const std::vector<int64_t>& values, std::size_t index) {
  return values.empty() ? 0 : values[index];
}

// The costs of all inner cuts that the rules allow, less those of `hiding`.
std::vector<int64_t> inner_costs(
    const std::vector<int64_t>& cut_ns,
    const std::vector<int64_t>& hiding,
    const Rules& rules) {
  std::vector<int64_t> costs;
  for (std::size_t j = 1; j + 1 < rules.cut_allowed.size(); ++j) {
    if (rules.cut_allowed[j] != 0) {
      costs.push_back(cut_ns[j] - entry_or_zero(hiding, j));
    }
  }
  return costs;
}

// The least total of `count` of the costs, no more than there are.
int64_t least_total(std::vector<int64_t> costs, int64_t count) {
  std::sort(costs.begin(), costs.end());
  int64_t total = 0;
  for (int64_t k = 0; k < count; ++k) {
    total += costs[static_cast<std::size_t>(k)];
  }
  return total;
}

// Lower bounds of what a partition comes to, each term by itself.
struct Floor {
  int64_t forward = 0;
  int64_t backward = 0;
  int64_t both = 0;  // forward + backward of one partition
  int64_t cuts = 0;
  int64_t plain_cuts = 0;     // what hides nothing
  int64_t end = 0;            // exposed + repeats * backward of a stage
  int64_t first_exposed = 0;  // by the first stage, which nothing hides

  // When the pipe ends, but for its forwards; when a step in `steps` does.
  int64_t mean_end(int64_t repeats, int64_t steps) const {
    return mean_end_ns(repeats * backward + cuts, plain_cuts + end, steps);
  }

  int64_t value(int64_t repeats, int64_t steps) const {
    return std::max(
        repeats * both + cuts + first_exposed / steps,
        repeats * forward + mean_end(repeats, steps));
  }
};

// Upper bounds of the same; those of terms that do not count are not looked at.
struct Caps {
  int64_t forward = Reach::kNoCap;
  int64_t backward = Reach::kNoCap;
  int64_t end = Reach::kNoCap;
};

// Looks for the best cuts between bounds; see Note [Bounds].
class CutSearch {
 public:
  CutSearch(
      const CutObjective& objective,
      const Rules& rules,
      int64_t num_stages)
      : objective_(objective),
        repeats_(objective.repeats),
        steps_(objective.accumulation_steps),
        rules_(rules),
        num_stages_(num_stages),
        cut_ns_(
            objective.cut_ns.empty()
                ? std::vector<int64_t>(rules.cut_allowed.size(), 0)
                : objective.cut_ns) {
    if (objective.exposed_ns) {
      own_end_ = [this](int64_t begin, int64_t end) {
        const SpanCost* backward = objective_.backward;
        return objective_.exposed_ns(begin, end) +
               (backward == nullptr ? 0
                                    : repeats_ * backward->layers(begin, end));
      };
    }
  }
  CutSearch(const CutSearch&) = delete;
  CutSearch& operator=(const CutSearch&) = delete;

  std::optional<BestCuts> best(int64_t cutoff) {
    const std::vector<StaircasePoint> points = stairs();
    if (points.empty()) {
      return std::nullopt;
    }
    const auto costs = inner_costs(cut_ns_, {}, rules_);
    const bool alike =
        std::adjacent_find(costs.begin(), costs.end(), std::not_equal_to<>()) ==
        costs.end();
    if (alike && !own_end_) {
      return within(cutoff, first_of_best(points));
    }
    find_floor(points);
    if (floor_.value(repeats_, steps_) > cutoff) {
      return std::nullopt;
    }
    BestCuts known = start_from(points);
    const int64_t at_most = std::min(cutoff, known.value);
    Reach reach(rules_, num_stages_);
    cap(reach, caps(at_most));
    if (!reach.tabulate()) {
      return std::nullopt;  // possible only below `known`
    }
    if (auto found = best_by_labels(objective_, reach, at_most)) {
      return found;
    }
    known.exact = false;
    return within(cutoff, std::move(known));
  }

 private:
  bool counts_stages() const {
    return repeats_ > 0;
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

  void find_floor(const std::vector<StaircasePoint>& points) {
    floor_.both = Reach::kNoCap;
    for (const StaircasePoint& point : points) {
      floor_.both = std::min(floor_.both, point.forward_ns + point.backward_ns);
    }
    floor_.forward = points.front().forward_ns;
    if (counts_stages() && objective_.backward != nullptr) {
      floor_.backward =
          min_max(*objective_.backward, rules_, num_stages_)->value;
    }
    floor_.cuts =
        least_total(inner_costs(cut_ns_, {}, rules_), num_stages_ - 1);
    floor_.plain_cuts = least_total(
        inner_costs(cut_ns_, objective_.hiding_cut_ns, rules_),
        num_stages_ - 1);
    if (own_end_) {
      Reach reach(rules_, num_stages_);
      floor_.end = least_under(reach, reach.watch(own_end_));
      floor_.first_exposed = least_first_exposed();
    }
  }

  int64_t least_first_exposed() const {
    const int64_t n = objective_.forward.get().num_layers();
    int64_t end = num_stages_ == 1 ? n : 1;
    while (end < n && rules_.cut_allowed[static_cast<std::size_t>(end)] == 0) {
      ++end;
    }
    return objective_.exposed_ns(0, end);
  }

  // The least cap of a term under those of `reach`, under which a partition
  // exists; capped to it.
  static int64_t least_under(Reach& reach, Reach::Handle term) {
    return reach.least_cap(term, 0, reach.probe(term).value);
  }

  void cap(Reach& reach, const Caps& most) const {
    if (counts_stages()) {
      reach.set_cap(reach.watch(objective_.forward.get()), most.forward);
      if (objective_.backward != nullptr) {
        reach.set_cap(reach.watch(*objective_.backward), most.backward);
      }
    }
    if (own_end_) {
      reach.set_cap(reach.watch(own_end_), most.end);
    }
  }

  // What each term can come to at most in a partition of that value.
  Caps caps(int64_t at_most) const {
    Caps most;
    if (counts_stages()) {
      const int64_t both =
          (at_most - floor_.cuts - floor_.first_exposed / steps_) / repeats_;
      most.forward = std::min(
          both - floor_.backward,
          (at_most - floor_.mean_end(repeats_, steps_)) / repeats_);
      most.backward = both - floor_.forward;
    }
    const int64_t pipe = repeats_ * floor_.backward + floor_.cuts;
    const Wide left = at_most - repeats_ * floor_.forward - pipe;
    most.end = static_cast<int64_t>(std::min<Wide>(
        pipe - floor_.plain_cuts + (left + 1) * steps_ - 1, Reach::kNoCap));
    return most;
  }

  // Good cuts to begin with: for the most promising points those with the
  // soonest end, then the cheapest; and what the soonest end of all allows.
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
      cap(reach, {point.forward_ns, point.backward_ns, Reach::kNoCap});
      if (own_end_) {
        least_under(reach, reach.watch(own_end_));
      }
      offer(known, reach);
    }
    if (own_end_ && counts_stages()) {
      Reach reach(rules_, num_stages_);
      cap(reach, {Reach::kNoCap, Reach::kNoCap, floor_.end});
      least_under(reach, reach.watch(objective_.forward.get()));
      if (objective_.backward != nullptr) {
        least_under(reach, reach.watch(*objective_.backward));
      }
      offer(known, reach);
    }
    return known;
  }

  // The cheapest cuts under the caps of `reach`, if better than the known ones.
  void offer(BestCuts& known, Reach& reach) const {
    Cuts cuts = cheapest_cuts(cut_ns_, reach).value().cuts;
    const int64_t value = value_of(objective_, cuts);
    if (value < known.value) {
      known = {value, std::move(cuts), true};
    }
  }

  const CutObjective& objective_;
  const int64_t repeats_;
  const int64_t steps_;
  const Rules& rules_;
  const int64_t num_stages_;
  const std::vector<int64_t> cut_ns_;
  StageFunction own_end_;  // empty: no all-reduce
  Floor floor_;
};

}  // namespace

int64_t value_of(const CutObjective& objective, const Cuts& cuts) {
  CutTerms terms;
  for (std::size_t k = cuts.size() - 1; k > 0; --k) {
    terms = terms.preceded_by(
        stage_terms(objective, cuts[k - 1], cuts[k]), objective.repeats);
  }
  return terms.value(objective);
}

// Note [Bounds]
// Each term alone has a least value, and forward + backward together one from
// the staircase: they bound the optimum from below, a few good cuts bound it
// from above. The difference is all that a single term may exceed its least
// value by, which caps it: near the optimum few begins per stage are left, and
// only those are walked (best_by_labels). Where all-reduces decide, it is how
// late they end that is capped: exposed + repeats * backward of the same stage.
std::optional<BestCuts> best_cuts(
    const CutObjective& objective,
    const Rules& rules,
    int64_t num_stages,
    int64_t cutoff) {
  if (num_stages < 1) {
    return std::nullopt;
  }
  return CutSearch(objective, rules, num_stages).best(cutoff);
}

}  // namespace pipetransformer::planner
