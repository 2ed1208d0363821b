// Which partitions exist under rules and caps that move: what the solvers ask
// again and again. Internal to the solvers of this room.
//
// Not thread-safe: each solver has one of its own. The rules and costs must
// outlive it. Note [Moving caps] in reach.cpp has the reasoning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "planner/solvers/partition.h"

namespace pipetransformer::planner {

class Reach {
 public:
  using Handle = std::size_t;
  static constexpr int64_t kNoCap = std::numeric_limits<int64_t>::max();

  Reach(const Rules& rules, int64_t num_stages);

  // A limit whose cap may be set; none to begin with.
  Handle watch(const SpanCost& cost);
  Handle watch(const StageCost& cost);
  Handle watch(const StageFunction& cost);
  void set_cap(Handle watched, int64_t cap);

  struct Probe {
    bool feasible;
    // Feasible: an upper bound, within the cap, of the smallest possible
    // largest stage of the watched cost. Else: the least cap, above the one
    // set, under which the answer may differ; kNoCap if none.
    int64_t value;
  };
  Probe probe(Handle watched);

  // The least cap of `watched` under which a partition exists. One exists under
  // `high`, none below `low`. Leaves that cap set.
  int64_t least_cap(Handle watched, int64_t low, int64_t high);

  // The lexicographically smallest cuts; nullopt if there are none.
  std::optional<Cuts> first_cuts();

  // The parts of a partition, for solvers that walk all of them. Call
  // `tabulate` after the last change of a cap; false: no partition exists.
  bool tabulate();
  // Range of the begins of stage `index` (index num_stages: n alone) that may
  // have a rest; which of them do; whether a stage may hold [begin, end).
  int64_t lowest_begin(int64_t index) const;
  int64_t highest_begin(int64_t index) const;
  bool has_rest(int64_t index, int64_t begin) const;
  bool fits(int64_t index, int64_t begin, int64_t end) const;
  // False: no stage `index` from `begin` reaches `end` or further.
  bool may_reach(int64_t index, int64_t begin, int64_t end) const;

  int64_t num_layers() const {
    return num_layers_;
  }
  int64_t num_stages() const {
    return num_stages_;
  }

 private:
  struct Test {
    const SpanCost* cost = nullptr;
    const SpanCost* repeated = nullptr;  // nullptr: equal for all positions
    const int64_t* counts = nullptr;
    const StageFunction* function = nullptr;  // in place of the costs
    int64_t cap = kNoCap;
  };
  // Ends of the first of the stages index .. K-1, by begin from `top` down.
  struct Level {
    int64_t top = 0;
    int64_t lowest = 0;  // smallest begin that has a rest
    std::size_t offset = 0;
    std::size_t count = 0;
  };

  Handle add(const Test& test);
  static bool overlapped(const Test& test) {
    return test.cost != nullptr && test.cost->overlapped();
  }
  // Cost of stage `index` with the layers [i, j): as limits test it (see
  // SpanCost::span), in full, and a bound that does not fall when it grows.
  static int64_t span_of(const Test& test, int64_t index, int64_t i, int64_t j);
  static int64_t
  whole_of(const Test& test, int64_t index, int64_t i, int64_t j);
  static int64_t
  floor_of(const Test& test, int64_t index, int64_t i, int64_t j);
  bool may_cut(int64_t position) const;
  template <class Fits>
  int64_t furthest(int64_t begin, const Fits& fits) const;

  Probe probe_greedily(const Test& watched);
  Probe move_cuts(const Test& watched, int64_t largest);
  Probe probe_table(const Test& watched);
  bool fill(const Test* watched);
  bool fill_tops(const Test* watched);
  void fill_level(int64_t index, const Test* watched);
  int64_t first_end(
      int64_t index,
      int64_t begin,
      const Level& rest,
      const Test* watched);
  int64_t next_end(int64_t index, int64_t begin) const;
  Cuts spelled() const;
  void note(const Test* watched, int64_t cost);
  void note_charges(const Test* watched, int64_t position);

  const int64_t num_layers_;
  const int64_t num_stages_;
  std::vector<Test> tests_;
  std::vector<int64_t> latest_cut_;  // last allowed position up to each index
  int64_t most_stages_ = 0;          // that cut_allowed alone admits
  bool greedy_ = true;               // see Note [Moving caps]
  bool by_position_ = false;
  bool overlapped_ = false;

  std::vector<int64_t> reached_;  // by the greedy walk, one entry per stage
  std::vector<Level> levels_;
  std::vector<int64_t> next_ends_;  // of all levels
  int64_t next_cap_ = kNoCap;
};

// What the walk and the table do all the time, inline for both.

inline int64_t
Reach::span_of(const Test& test, int64_t index, int64_t i, int64_t j) {
  if (test.function != nullptr) {
    return (*test.function)(i, j);
  }
  const int64_t cost = test.cost->span(i, j);
  return test.repeated == nullptr
             ? cost
             : cost + test.counts[index] * test.repeated->span(i, j);
}

inline int64_t
Reach::whole_of(const Test& test, int64_t index, int64_t i, int64_t j) {
  return overlapped(test) ? test.cost->stage(i, j) : span_of(test, index, i, j);
}

// Lower bound of span_of that does not fall when the stage grows.
inline int64_t
Reach::floor_of(const Test& test, int64_t index, int64_t i, int64_t j) {
  if (test.function != nullptr) {
    return (*test.function)(i, j);
  }
  const int64_t cost = test.cost->layers(i, j);
  return test.repeated == nullptr
             ? cost
             : cost + test.counts[index] * test.repeated->layers(i, j);
}

inline bool Reach::fits(int64_t index, int64_t begin, int64_t end) const {
  for (const Test& test : tests_) {
    if (span_of(test, index, begin, end) > test.cap) {
      return false;
    }
  }
  return true;
}

inline bool Reach::may_reach(int64_t index, int64_t begin, int64_t end) const {
  for (const Test& test : tests_) {
    if (floor_of(test, index, begin, end) > test.cap) {
      return false;
    }
  }
  return true;
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

}  // namespace pipetransformer::planner
