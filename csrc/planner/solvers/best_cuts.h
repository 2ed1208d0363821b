// Exact minimum, over cuts, of all of a step that cuts decide: the largest
// stages, the cost of the boundaries cut and the longest exposed all-reduce.
// Pure, int64, thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "planner/solvers/partition.h"

namespace pipetransformer::planner {

// value(cuts) = repeats * (max forward + max backward) + sum of cut_ns over the
// inner cuts + the longest exposed all-reduce, or 0, over accumulation_steps.
// What a stage exposes is its exposed_ns, less what hides it of the stages
// before: repeats times how much slower than it and all later ones their
// slowest backward is, and hiding_cut_ns of their cuts. Holds references.
struct CutObjective {
  std::reference_wrapper<const SpanCost> forward;
  // nullptr: none. A schedule that runs both in turns (1F1B) puts forward +
  // backward into `forward`.
  const SpanCost* backward = nullptr;
  int64_t repeats = 0;  // M - 1
  // n + 1 entries, not negative, paid once for each inner cut; empty: none.
  std::vector<int64_t> cut_ns = {};
  // The part of cut_ns, at most all, that hides later all-reduces; empty: none.
  std::vector<int64_t> hiding_cut_ns = {};
  // A stage's all-reduce: its bytes as a transfer time, less a slack that grows
  // with begin, or 0. Empty: none.
  StageFunction exposed_ns = {};
  // Of so many steps one has an all-reduce; at least 1.
  int64_t accumulation_steps = 1;
};

struct BestCuts {
  int64_t value;
  Cuts cuts;
  // True: no cuts are better, and none as good are lexicographically smaller.
  // False only if there are more than kMostSureCuts cuts to choose from, and so
  // many partial ones that none other beats that most were given up: where
  // all-reduces take longer than the pipe, with many stages.
  bool exact;
};

inline constexpr int64_t kMostSureCuts = 4096;

int64_t value_of(const CutObjective& objective, const Cuts& cuts);

// The best cuts under `rules`; nullopt if there are none, or none with a value
// up to `cutoff`: a caller that knows a better plan passes its value and is
// answered sooner. See Note [Labels].
std::optional<BestCuts> best_cuts(
    const CutObjective& objective,
    const Rules& rules,
    int64_t num_stages,
    int64_t cutoff = std::numeric_limits<int64_t>::max());

}  // namespace pipetransformer::planner
