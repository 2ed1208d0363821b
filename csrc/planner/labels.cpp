#include "planner/labels.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace pipetransformer::planner {

namespace {

constexpr Label kUnreachable{
    Reach::kNoCap,
    Reach::kNoCap,
    Reach::kNoCap,
    Reach::kNoCap};

bool as_good(const Label& a, const Label& b) {
  return a.forward <= b.forward && a.backward <= b.backward &&
         a.cut_total <= b.cut_total && a.exposed <= b.exposed;
}

// `a` followed by `b`.
Label joined(const Label& a, const Label& b) {
  return {
      std::max(a.forward, b.forward),
      std::max(a.backward, b.backward),
      a.cut_total + b.cut_total,
      std::max(a.exposed, b.exposed)};
}

Label least(const Label& a, const Label& b) {
  return {
      std::min(a.forward, b.forward),
      std::min(a.backward, b.backward),
      std::min(a.cut_total, b.cut_total),
      std::min(a.exposed, b.exposed)};
}

// The labels of one place.
class Front {
 public:
  const std::vector<Label>& labels() const {
    return labels_;
  }

  // False: there are too many, and the worst by `bound` was given up.
  template <class Bound>
  bool add(const Label& label, const Bound& bound) {
    if (std::any_of(labels_.begin(), labels_.end(), [&](const Label& old) {
          return as_good(old, label);
        })) {
      return true;
    }
    labels_.erase(
        std::remove_if(
            labels_.begin(),
            labels_.end(),
            [&](const Label& old) { return as_good(label, old); }),
        labels_.end());
    labels_.push_back(label);
    if (static_cast<int64_t>(labels_.size()) <= kMostLabels) {
      return true;
    }
    labels_.erase(std::max_element(
        labels_.begin(), labels_.end(), [&](const Label& a, const Label& b) {
          return bound(a) < bound(b);
        }));
    return false;
  }

 private:
  std::vector<Label> labels_;
};

class Walk {
 public:
  Walk(const CutObjective& objective, const Reach& reach, int64_t at_most)
      : objective_(objective),
        reach_(reach),
        at_most_(at_most),
        counts_stages_(objective.repeats > 0),
        rests_(static_cast<std::size_t>(reach.num_stages()) + 1) {}

  BestLabels run() {
    bound_rests();
    std::vector<Front> fronts(1);
    Label start = rests_.front().front();  // bounds of all that follows
    start.cut_total = 0;                   // but no cut is paid yet
    fronts.front().add(start, [](const Label&) { return int64_t{0}; });
    for (int64_t k = 0; k < reach_.num_stages(); ++k) {
      fronts = advance(k, fronts);
    }
    BestLabels best{fronts.front().labels(), exact_};
    keep_least(best.labels);
    return best;
  }

 private:
  std::size_t place(int64_t index, int64_t begin) const {
    return static_cast<std::size_t>(begin - reach_.lowest_begin(index));
  }

  Label stage(int64_t begin, int64_t end) const {
    Label label;
    if (counts_stages_) {
      label.forward = objective_.forward.get().stage(begin, end);
      if (objective_.backward != nullptr) {
        label.backward = objective_.backward->stage(begin, end);
      }
    }
    if (!objective_.cut_ns.empty() && end < reach_.num_layers()) {
      label.cut_total = objective_.cut_ns[static_cast<std::size_t>(end)];
    }
    if (objective_.exposed_ns) {
      label.exposed = objective_.exposed_ns(begin, end);
    }
    return label;
  }

  template <class Visit>
  void visit_ends(int64_t index, int64_t begin, const Visit& visit) const {
    for (int64_t end = std::max(begin + 1, reach_.lowest_begin(index + 1));
         end <= reach_.highest_begin(index + 1) &&
         reach_.may_reach(index, begin, end);
         ++end) {
      if (reach_.has_rest(index + 1, end) && reach_.fits(index, begin, end)) {
        visit(end);
      }
    }
  }

  // The least that each term can come to behind each begin, one by one.
  void bound_rests() {
    rests_.back() = {Label{}};
    for (int64_t k = reach_.num_stages() - 1; k >= 0; --k) {
      auto& row = rests_[static_cast<std::size_t>(k)];
      for (int64_t i = reach_.lowest_begin(k); i <= reach_.highest_begin(k);
           ++i) {
        row.push_back(kUnreachable);
        if (reach_.has_rest(k, i)) {
          visit_ends(k, i, [&](int64_t end) {
            row.back() = least(row.back(), joined(stage(i, end), rest(k, end)));
          });
        }
      }
    }
  }

  const Label& rest(int64_t index, int64_t end) const {
    return rests_[static_cast<std::size_t>(index) + 1][place(index + 1, end)];
  }

  std::vector<Front> advance(int64_t index, const std::vector<Front>& fronts) {
    std::vector<Front> next(rests_[static_cast<std::size_t>(index) + 1].size());
    for (std::size_t at = 0; at < fronts.size(); ++at) {
      if (fronts[at].labels().empty()) {
        continue;
      }
      const int64_t begin =
          reach_.lowest_begin(index) + static_cast<int64_t>(at);
      visit_ends(index, begin, [&](int64_t end) {
        extend(
            fronts[at],
            stage(begin, end),
            rest(index, end),
            next[place(index + 1, end)]);
      });
    }
    return next;
  }

  void extend(
      const Front& front,
      const Label& stage,
      const Label& rest,
      Front& next) {
    const auto bound = [&](const Label& label) {
      return value_of(objective_, label) + rest.cut_total;
    };
    for (const Label& before : front.labels()) {
      Label label = joined(before, stage);
      label.forward = std::max(label.forward, rest.forward);
      label.backward = std::max(label.backward, rest.backward);
      label.exposed = std::max(label.exposed, rest.exposed);
      if (bound(label) <= at_most_ && !next.add(label, bound)) {
        exact_ = false;
      }
    }
  }

  void keep_least(std::vector<Label>& labels) const {
    int64_t least = at_most_;
    for (const Label& label : labels) {
      least = std::min(least, value_of(objective_, label));
    }
    labels.erase(
        std::remove_if(
            labels.begin(),
            labels.end(),
            [&](const Label& label) {
              return value_of(objective_, label) > least;
            }),
        labels.end());
  }

  const CutObjective& objective_;
  const Reach& reach_;
  const int64_t at_most_;
  const bool counts_stages_;
  std::vector<std::vector<Label>> rests_;  // by level, from the lowest begin
  bool exact_ = true;
};

}  // namespace

int64_t value_of(const CutObjective& objective, const Label& label) {
  return objective.repeats * (label.forward + label.backward) +
         label.cut_total + label.exposed;
}

// Note [Labels]
// Partial cuts up to a place (level, begin) matter by four numbers only, and
// one that is as good in all of them makes others superfluous. Every maximum is
// raised at once to the least that the rest can come to: it will get there
// anyhow, and many labels become equal. What exceeds the best known value, with
// the least of the rest's cuts added, is dropped.
// Why no optimum is lost: dropping a label for one as good, and completing that
// one the same way, gives terms that are as good; if they were better anywhere
// the first was no optimum (each term counts, as unused ones are 0). So every
// vector of terms that an optimum has arrives at the end, and the
// lexicographically smallest cuts follow from their caps (cheapest_cuts).
BestLabels best_labels(
    const CutObjective& objective,
    const Reach& reach,
    int64_t at_most) {
  return Walk(objective, reach, at_most).run();
}

}  // namespace pipetransformer::planner
