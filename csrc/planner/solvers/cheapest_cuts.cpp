#include "planner/solvers/cheapest_cuts.h"

#include <algorithm>
#include <cstddef>

namespace pipetransformer::planner {

namespace {

// Least total behind a begin, by level; kNoCap where there is no rest.
class Table {
 public:
  Table(const std::vector<int64_t>& cut_ns, const Reach& reach)
      : cut_ns_(cut_ns),
        reach_(reach),
        rows_(static_cast<std::size_t>(reach.num_stages()) + 1) {
    const int64_t num_stages = reach_.num_stages();
    rows_.back() = {0};
    for (int64_t k = num_stages - 1; k >= 0; --k) {
      auto& row = rows_[static_cast<std::size_t>(k)];
      for (int64_t i = reach_.lowest_begin(k); i <= reach_.highest_begin(k);
           ++i) {
        row.push_back(reach_.has_rest(k, i) ? least(k, i) : Reach::kNoCap);
      }
    }
  }

  CheapestCuts cheapest() const {
    CheapestCuts found{total(0, 0), {0}};
    int64_t left = found.total;
    for (int64_t k = 0; k < reach_.num_stages(); ++k) {
      const int64_t end = first_end(k, found.cuts.back(), left);
      left -= charge(end);
      found.cuts.push_back(end);
    }
    return found;
  }

 private:
  int64_t total(int64_t index, int64_t begin) const {
    return rows_[static_cast<std::size_t>(index)]
                [static_cast<std::size_t>(begin - reach_.lowest_begin(index))];
  }
  int64_t charge(int64_t position) const {
    return position == reach_.num_layers()
               ? 0
               : cut_ns_[static_cast<std::size_t>(position)];
  }

  // Calls visit(end, total of the rest with that cut) until it returns true.
  template <class Visit>
  void visit_ends(int64_t index, int64_t begin, const Visit& visit) const {
    for (int64_t end = std::max(begin + 1, reach_.lowest_begin(index + 1));
         end <= reach_.highest_begin(index + 1) &&
         reach_.may_reach(index, begin, end);
         ++end) {
      if (reach_.has_rest(index + 1, end) && reach_.fits(index, begin, end) &&
          visit(end, total(index + 1, end) + charge(end))) {
        return;
      }
    }
  }

  int64_t least(int64_t index, int64_t begin) const {
    int64_t least = Reach::kNoCap;
    visit_ends(index, begin, [&](int64_t, int64_t total) {
      least = std::min(least, total);
      return false;
    });
    return least;
  }

  int64_t first_end(int64_t index, int64_t begin, int64_t at_most) const {
    int64_t found = 0;
    visit_ends(index, begin, [&](int64_t end, int64_t total) {
      found = end;
      return total <= at_most;
    });
    return found;
  }

  const std::vector<int64_t>& cut_ns_;
  const Reach& reach_;
  std::vector<std::vector<int64_t>> rows_;  // from the lowest begin
};

}  // namespace

std::optional<CheapestCuts> cheapest_cuts(
    const std::vector<int64_t>& cut_ns,
    const Rules& rules,
    int64_t num_stages) {
  Reach reach(rules, num_stages);
  return cheapest_cuts(cut_ns, reach);
}

std::optional<CheapestCuts>
cheapest_cuts(const std::vector<int64_t>& cut_ns, Reach& reach) {
  if (!reach.tabulate()) {
    return std::nullopt;
  }
  return Table(cut_ns, reach).cheapest();
}

}  // namespace pipetransformer::planner
