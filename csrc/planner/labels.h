// Partial cuts as vectors of what they cost so far, kept while no other at the
// same place is as good in everything. Internal to best_cuts.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/best_cuts.h"
#include "planner/reach.h"

namespace pipetransformer::planner {

// The terms of a CutObjective: largest stages so far (0 where a term does not
// count), sum of the cuts, longest exposed all-reduce.
struct Label {
  int64_t forward = 0;
  int64_t backward = 0;
  int64_t cut_total = 0;
  int64_t exposed = 0;

  bool operator==(const Label&) const = default;
};

int64_t value_of(const CutObjective& objective, const Label& label);

struct BestLabels {
  std::vector<Label> labels;  // all different ones with the least value
  bool exact = true;          // see BestCuts::exact
};

// The terms of the best partitions within the caps of `reach`, which must be
// tabulated, with a value up to `at_most`; empty if there are none.
// See Note [Labels].
BestLabels
best_labels(const CutObjective& objective, const Reach& reach, int64_t at_most);

}  // namespace pipetransformer::planner
