#include "planner/solvers/labels.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "planner/solvers/cut_terms.h"

namespace pipetransformer::planner {

namespace {

// Comparisons of labels after which only the few most promising ones of a place
// are kept: about 10 ms, where there are too many cuts to be sure.
constexpr int64_t kMostWork = int64_t{1} << 21;
constexpr std::size_t kFewLabels = 16;

// The least that the stages before a place can come to, each term by itself.
struct Before {
  int64_t forward = Reach::kNoCap;
  int64_t backward = Reach::kNoCap;
  int64_t cuts = Reach::kNoCap;        // with the one at this place
  int64_t plain_cuts = Reach::kNoCap;  // of these, what hides nothing
  int64_t end = Reach::kNoCap;  // exposed + repeats * backward of a stage
  int64_t exposed = Reach::kNoCap;
  int64_t first_exposed = Reach::kNoCap;  // of the first stage: never hidden
  int64_t num_cuts = 0;  // ways to get here, up to one above kMostSureCuts

  bool reached() const {
    return cuts != Reach::kNoCap;
  }
};

class Walk {
 public:
  Walk(const CutObjective& objective, const Reach& reach, int64_t at_most)
      : objective_(objective),
        reach_(reach),
        at_most_(at_most),
        befores_(static_cast<std::size_t>(reach.num_stages()) + 1),
        fronts_(befores_.size()) {
    for (int64_t k = 0; k <= reach_.num_stages(); ++k) {
      const auto width = static_cast<std::size_t>(
          reach_.highest_begin(k) - reach_.lowest_begin(k) + 1);
      befores_[static_cast<std::size_t>(k)].resize(width);
      fronts_[static_cast<std::size_t>(k)].resize(width);
    }
  }

  std::optional<BestCuts> run() {
    bound_from_the_left();
    few_cuts_ = before(reach_.num_stages(), reach_.num_layers()).num_cuts <=
                kMostSureCuts;
    front(reach_.num_stages(), reach_.num_layers()) = {CutTerms{}};
    for (int64_t k = reach_.num_stages() - 1; k >= 0; --k) {
      for (int64_t i = reach_.lowest_begin(k); i <= reach_.highest_begin(k);
           ++i) {
        if (before(k, i).reached()) {
          fill(k, i);
        }
      }
    }
    int64_t least = Reach::kNoCap;
    for (const CutTerms& label : front(0, 0)) {
      least = std::min(least, label.value(objective_));
    }
    if (least == Reach::kNoCap) {
      return std::nullopt;
    }
    return BestCuts{least, first_cuts(least), exact_};
  }

 private:
  using Front = std::vector<CutTerms>;

  Front& front(int64_t index, int64_t begin) {
    return fronts_[static_cast<std::size_t>(index)][static_cast<std::size_t>(
        begin - reach_.lowest_begin(index))];
  }
  Before& before(int64_t index, int64_t begin) {
    return befores_[static_cast<std::size_t>(index)][static_cast<std::size_t>(
        begin - reach_.lowest_begin(index))];
  }

  // Calls visit(end) for the ends that stage `index` may have, until it returns
  // true.
  template <class Visit>
  void visit_ends(int64_t index, int64_t begin, const Visit& visit) const {
    for (int64_t end = std::max(begin + 1, reach_.lowest_begin(index + 1));
         end <= reach_.highest_begin(index + 1) &&
         reach_.may_reach(index, begin, end);
         ++end) {
      if (reach_.has_rest(index + 1, end) && reach_.fits(index, begin, end) &&
          visit(end)) {
        return;
      }
    }
  }

  void bound_from_the_left() {
    before(0, 0) = {0, 0, 0, 0, 0, 0, 0, 1};
    for (int64_t k = 0; k < reach_.num_stages(); ++k) {
      for (int64_t i = reach_.lowest_begin(k); i <= reach_.highest_begin(k);
           ++i) {
        if (reach_.has_rest(k, i) && before(k, i).reached()) {
          visit_ends(k, i, [&](int64_t end) {
            lower(before(k + 1, end), before(k, i), i, end);
            return false;
          });
        }
      }
    }
  }

  void
  lower(Before& bound, const Before& from, int64_t begin, int64_t end) const {
    const StageTerms stage = stage_terms(objective_, begin, end);
    const int64_t own = stage.exposed + objective_.repeats * stage.backward;
    bound.forward =
        std::min(bound.forward, std::max(from.forward, stage.forward));
    bound.backward =
        std::min(bound.backward, std::max(from.backward, stage.backward));
    bound.cuts = std::min(bound.cuts, from.cuts + stage.cut);
    bound.plain_cuts =
        std::min(bound.plain_cuts, from.plain_cuts + stage.cut - stage.hiding);
    bound.end = std::min(bound.end, std::max(from.end, own));
    bound.exposed =
        std::min(bound.exposed, std::max(from.exposed, stage.exposed));
    bound.first_exposed = std::min(
        bound.first_exposed, begin == 0 ? stage.exposed : from.first_exposed);
    bound.num_cuts =
        std::min(bound.num_cuts + from.num_cuts, kMostSureCuts + 1);
  }

  void fill(int64_t index, int64_t begin) {
    Front& labels = front(index, begin);
    const Before& bound = before(index, begin);
    visit_ends(index, begin, [&](int64_t end) {
      const Front& rest = front(index + 1, end);
      if (!rest.empty()) {
        const StageTerms stage = stage_terms(objective_, begin, end);
        for (const CutTerms& after : rest) {
          CutTerms label = after.preceded_by(stage, objective_.repeats);
          raise(label, bound);
          if (least_with(label, bound) <= at_most_) {
            add(labels, label, bound);
          }
        }
      }
      return false;
    });
  }

  // Maxima that the stages before will exceed anyhow: many labels become equal.
  void raise(CutTerms& label, const Before& bound) const {
    label.forward = std::max(label.forward, bound.forward);
    if (!objective_.exposed_ns) {
      label.backward = std::max(label.backward, bound.backward);
      label.end = 0;
    }
  }

  // Lower bound of the value of a partition that ends like this.
  int64_t least_with(const CutTerms& label, const Before& bound) const {
    const int64_t repeats = objective_.repeats;
    const int64_t pipe = repeats * std::max(label.backward, bound.backward) +
                         label.cuts + bound.cuts;
    const int64_t before =
        std::max(bound.end, bound.exposed + repeats * label.backward);
    const int64_t end = std::max(
        {pipe + bound.first_exposed,
         label.end + bound.plain_cuts,
         before + label.cuts});
    return repeats * std::max(label.forward, bound.forward) +
           mean_end_ns(pipe, end, objective_.accumulation_steps);
  }

  void add(Front& labels, const CutTerms& label, const Before& bound) {
    work_ += static_cast<int64_t>(labels.size()) + 1;
    if (std::any_of(labels.begin(), labels.end(), [&](const CutTerms& old) {
          return old.as_good_as(label);
        })) {
      return;
    }
    labels.erase(
        std::remove_if(
            labels.begin(),
            labels.end(),
            [&](const CutTerms& old) { return label.as_good_as(old); }),
        labels.end());
    labels.push_back(label);
    if (few_cuts_ || work_ <= kMostWork || labels.size() <= kFewLabels) {
      return;
    }
    exact_ = false;
    labels.erase(std::max_element(
        labels.begin(),
        labels.end(),
        [&](const CutTerms& a, const CutTerms& b) {
          return least_with(a, bound) < least_with(b, bound);
        }));
  }

  // The lexicographically first cuts of a value: the first end from which some
  // label completes the stages so far.
  Cuts first_cuts(int64_t value) {
    Cuts cuts{0};
    std::vector<StageTerms> stages;
    for (int64_t k = 0; k < reach_.num_stages(); ++k) {
      const int64_t begin = cuts.back();
      visit_ends(k, begin, [&](int64_t end) {
        stages.push_back(stage_terms(objective_, begin, end));
        const Front& rest = front(k + 1, end);
        const bool completes =
            std::any_of(rest.begin(), rest.end(), [&](const CutTerms& after) {
              return completed(stages, after) <= value;
            });
        if (completes) {
          cuts.push_back(end);
        } else {
          stages.pop_back();
        }
        return completes;
      });
    }
    return cuts;
  }

  int64_t completed(const std::vector<StageTerms>& stages, CutTerms all) const {
    for (auto stage = stages.rbegin(); stage != stages.rend(); ++stage) {
      all = all.preceded_by(*stage, objective_.repeats);
    }
    return all.value(objective_);
  }

  const CutObjective& objective_;
  const Reach& reach_;
  const int64_t at_most_;
  // By level, from the lowest begin.
  std::vector<std::vector<Before>> befores_;
  std::vector<std::vector<Front>> fronts_;
  bool few_cuts_ = true;
  int64_t work_ = 0;  // counted, not timed: equal input, equal answer
  bool exact_ = true;
};

}  // namespace

// Note [Labels]
// The last stages of a partition matter to those before by four numbers only
// (CutTerms), and one that is as good in all of them makes others superfluous:
// putting the same stages before it keeps it as good. Labels whose value, with
// the least that the stages before can come to, exceeds the best known one are
// dropped; maxima that those stages will exceed anyhow are raised to it at
// once. (The largest backward is not, where all-reduces count: a stage's hides
// behind how much slower than it and all later ones the stages before are.) The
// least value at the first place is the optimum. The lexicographically first
// cuts follow from the labels of each place: if any cuts beyond a place
// complete the ones before with that value, one of its labels does.
std::optional<BestCuts> best_by_labels(
    const CutObjective& objective,
    const Reach& reach,
    int64_t at_most) {
  return Walk(objective, reach, at_most).run();
}

}  // namespace pipetransformer::planner
