#include "planner/reach.h"

#include <algorithm>
#include <utility>

namespace pipetransformer::planner {

namespace {

constexpr int64_t kNone = -1;

}  // namespace

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

int64_t Reach::span_of(const Test& test, int64_t index, int64_t i, int64_t j) {
  if (test.function != nullptr) {
    return (*test.function)(i, j);
  }
  const int64_t cost = test.cost->span(i, j);
  return test.repeated == nullptr
             ? cost
             : cost + test.counts[index] * test.repeated->span(i, j);
}

int64_t Reach::whole_of(const Test& test, int64_t index, int64_t i, int64_t j) {
  return overlapped(test) ? test.cost->stage(i, j) : span_of(test, index, i, j);
}

// Lower bound of span_of that does not fall when the stage grows.
int64_t Reach::floor_of(const Test& test, int64_t index, int64_t i, int64_t j) {
  if (test.function != nullptr) {
    return (*test.function)(i, j);
  }
  const int64_t cost = test.cost->layers(i, j);
  return test.repeated == nullptr
             ? cost
             : cost + test.counts[index] * test.repeated->layers(i, j);
}

bool Reach::fits(int64_t index, int64_t begin, int64_t end) const {
  for (const Test& test : tests_) {
    if (span_of(test, index, begin, end) > test.cap) {
      return false;
    }
  }
  return true;
}

bool Reach::may_reach(int64_t index, int64_t begin, int64_t end) const {
  for (const Test& test : tests_) {
    if (floor_of(test, index, begin, end) > test.cap) {
      return false;
    }
  }
  return true;
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

// The last end from `begin` up to which `fits` holds; `begin` if none.
template <class Fits>
int64_t Reach::furthest(int64_t begin, const Fits& fits) const {
  int64_t end = begin;
  int64_t step = 1;
  while (end + step <= num_layers_ && fits(end + step)) {
    end += step;
    step *= 2;
  }
  for (step /= 2; step > 0; step /= 2) {
    if (end + step <= num_layers_ && fits(end + step)) {
      end += step;
    }
  }
  return end;
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

Reach::Probe Reach::probe_table(const Test& watched) {
  next_cap_ = kNoCap;
  if (!fill(&watched)) {
    return {false, next_cap_};
  }
  const Cuts cuts = spelled();
  int64_t largest = 0;
  for (int64_t k = 0; k < num_stages_; ++k) {
    const auto index = static_cast<std::size_t>(k);
    largest =
        std::max(largest, whole_of(watched, k, cuts[index], cuts[index + 1]));
  }
  return {true, largest};
}

std::optional<Cuts> Reach::first_cuts() {
  if (!tabulate()) {
    return std::nullopt;
  }
  return spelled();
}

bool Reach::tabulate() {
  return num_stages_ >= 1 && num_stages_ <= most_stages_ && fill(nullptr);
}

Cuts Reach::spelled() const {
  Cuts cuts{0};
  for (int64_t k = 0; k < num_stages_; ++k) {
    cuts.push_back(next_end(k, cuts.back()));
  }
  return cuts;
}

int64_t Reach::next_end(int64_t index, int64_t begin) const {
  const Level& level = levels_[static_cast<std::size_t>(index)];
  const auto place = static_cast<std::size_t>(level.top - begin);
  return begin > level.top || place >= level.count
             ? kNone
             : next_ends_[level.offset + place];
}

int64_t Reach::lowest_begin(int64_t index) const {
  return levels_[static_cast<std::size_t>(index)].lowest;
}

int64_t Reach::highest_begin(int64_t index) const {
  return levels_[static_cast<std::size_t>(index)].top;
}

bool Reach::has_rest(int64_t index, int64_t begin) const {
  return next_end(index, begin) != kNone;
}

bool Reach::fill(const Test* watched) {
  if (!may_cut(0) || !may_cut(num_layers_)) {
    note_charges(watched, 0);
    note_charges(watched, num_layers_);
    return false;
  }
  if (!fill_tops(watched)) {
    return false;
  }
  next_ends_.assign(1, num_layers_);
  for (int64_t k = num_stages_ - 1; k >= 0; --k) {
    fill_level(k, watched);
    if (levels_[static_cast<std::size_t>(k)].lowest > num_layers_) {
      return false;
    }
  }
  return has_rest(0, 0);
}

// The highest begin of each stage, by layers alone.
bool Reach::fill_tops(const Test* watched) {
  levels_.assign(static_cast<std::size_t>(num_stages_) + 1, Level{});
  int64_t begin = 0;
  for (int64_t k = 0; k < num_stages_; ++k) {
    levels_[static_cast<std::size_t>(k)].top =
        std::min(begin, num_layers_ - (num_stages_ - k));
    const int64_t from = begin;
    begin =
        furthest(from, [&](int64_t end) { return may_reach(k, from, end); });
    if (watched != nullptr && begin < num_layers_) {
      note(watched, floor_of(*watched, k, from, begin + 1));
    }
  }
  levels_.back() = {num_layers_, num_layers_, 0, 1};
  return begin == num_layers_;
}

void Reach::fill_level(int64_t index, const Test* watched) {
  Level& level = levels_[static_cast<std::size_t>(index)];
  const Level& rest = levels_[static_cast<std::size_t>(index) + 1];
  level.offset = next_ends_.size();
  level.lowest = num_layers_ + 1;
  for (int64_t begin = level.top; begin >= index; --begin) {
    if (begin < rest.lowest && !may_reach(index, begin, rest.lowest)) {
      if (watched != nullptr) {
        note(watched, floor_of(*watched, index, begin, rest.lowest));
      }
      break;
    }
    int64_t end = kNone;
    if (latest_cut_[static_cast<std::size_t>(begin)] != begin) {
      // Not allowed, whatever the caps.
    } else if (may_cut(begin)) {
      end = first_end(index, begin, rest, watched);
    } else {
      note_charges(watched, begin);
    }
    next_ends_.push_back(end);
    if (end != kNone) {
      level.lowest = begin;
    }
  }
  level.count = next_ends_.size() - level.offset;
}

int64_t Reach::first_end(
    int64_t index,
    int64_t begin,
    const Level& rest,
    const Test* watched) {
  for (int64_t end = std::max(begin + 1, rest.lowest); end <= rest.top; ++end) {
    if (!may_reach(index, begin, end)) {
      if (watched != nullptr) {
        note(watched, floor_of(*watched, index, begin, end));
      }
      return kNone;
    }
    if (next_end(index + 1, end) == kNone) {
      continue;
    }
    if (fits(index, begin, end)) {
      return end;
    }
    if (watched != nullptr) {
      note(watched, span_of(*watched, index, begin, end));
    }
  }
  return kNone;
}

}  // namespace pipetransformer::planner
