#include "planner/solvers/reach.h"

#include <algorithm>
#include <utility>

namespace pipetransformer::planner {

// Note [Moving caps]
// A solver asks "is there a partition within this cap?" for caps that close in
// on the smallest one. Two ways to answer:
//
// Greedy walk, O(K log n). If no stage costs less than one inside it (monotone
// limits), letting every stage reach as far as it can is best: by induction no
// partition has its k-th cut beyond the walk's. Where limits grow looser from
// stage to stage (counts that do not increase), the walk decides for exactly K
// non-empty stages: a partition exists iff the walk ends at n and the part up
// to its m-th cut has at least m segments between allowed cuts, for every m.
// (Then move cuts left until no stage is empty, from the last: a stage either
// shrinks, or becomes one segment of an earlier, tighter stage.)
//
// Table, in all other cases. Level k says from which begins stages k .. K-1 can
// hold the rest, and the first end of stage k then. Costs that are not monotone
// (added copies) make every end of a window a candidate, but the window starts
// at the lowest begin that has a rest, and the scan normally succeeds there.
// Begins are bounded on the right by the walk that counts layers alone (a lower
// bound of any stage, and monotone) and on the left by where layers alone do
// not reach the lowest rest: near the smallest cap a few begins per level are
// left, so a decision costs far less than O(K n). The first end found is the
// smallest: following them from 0 spells the lexicographically first cuts.
//
// Either way, the cheapest watched cost among the stages that the answer turned
// down is the least cap under which the answer can differ: bisection jumps
// there, and down to the largest stage of what it found.

Reach::Reach(const Rules& rules, int64_t num_stages)
    : num_layers_(static_cast<int64_t>(rules.cut_allowed.size()) - 1),
      num_stages_(num_stages) {
  const auto size = rules.cut_allowed.size();
  latest_cut_.assign(size, 0);
  for (std::size_t j = 1; j < size; ++j) {
    const bool allowed = j + 1 == size || rules.cut_allowed[j] != 0;
    latest_cut_[j] = allowed ? static_cast<int64_t>(j) : latest_cut_[j - 1];
    most_stages_ += allowed ? 1 : 0;
  }
  for (const Limit& limit : rules.limits) {
    set_cap(watch(limit.cost), limit.cap);
  }
  for (const StageLimit& limit : rules.stage_limits) {
    set_cap(watch(limit.cost), limit.cap);
  }
}

Reach::Handle Reach::watch(const SpanCost& cost) {
  greedy_ = greedy_ && cost.monotone();
  overlapped_ = overlapped_ || cost.overlapped();
  return add({.cost = &cost});
}

Reach::Handle Reach::watch(const StageFunction& cost) {
  return add({.function = &cost});
}

Reach::Handle Reach::watch(const StageCost& cost) {
  by_position_ = true;
  greedy_ = greedy_ && cost.fixed.get().monotone() &&
            cost.repeated.get().monotone() &&
            std::is_sorted(cost.counts.rbegin(), cost.counts.rend());
  return add(
      {.cost = &cost.fixed.get(),
       .repeated = &cost.repeated.get(),
       .counts = cost.counts.data()});
}

Reach::Handle Reach::add(const Test& test) {
  tests_.push_back(test);
  return tests_.size() - 1;
}

void Reach::set_cap(Handle watched, int64_t cap) {
  tests_[watched].cap = cap;
}

// Whether the charges of overlapped copies allow a stage to end and to begin
// here; cut_allowed is not asked.
bool Reach::may_cut(int64_t position) const {
  return !overlapped_ ||
         std::all_of(tests_.begin(), tests_.end(), [&](const Test& test) {
           return !overlapped(test) ||
                  ((position == num_layers_ ||
                    test.cost->entry(position) <= test.cap) &&
                   (position == 0 || test.cost->exit(position) <= test.cap));
         });
}

void Reach::note(const Test* watched, int64_t cost) {
  if (watched != nullptr && cost > watched->cap) {
    next_cap_ = std::min(next_cap_, cost);
  }
}

void Reach::note_charges(const Test* watched, int64_t position) {
  if (watched != nullptr && overlapped(*watched)) {
    note(watched, watched->cost->entry(position));
    note(watched, watched->cost->exit(position));
  }
}

Reach::Probe Reach::probe(Handle watched) {
  if (num_stages_ < 1 || num_stages_ > most_stages_) {
    return {false, kNoCap};
  }
  return greedy_ ? probe_greedily(tests_[watched])
                 : probe_table(tests_[watched]);
}

int64_t Reach::least_cap(Handle watched, int64_t low, int64_t high) {
  // In turns: the lowest cap left, which a jump has often made the answer, and
  // the middle.
  bool lowest = true;
  while (low < high) {
    const int64_t cap = lowest ? low : low + (high - low) / 2;
    lowest = !lowest;
    set_cap(watched, cap);
    const Probe found = probe(watched);
    if (found.feasible) {
      high = found.value;
    } else {
      low = std::min(high, found.value);
    }
  }
  set_cap(watched, high);
  return high;
}

}  // namespace pipetransformer::planner
