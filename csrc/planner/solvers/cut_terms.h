// What the last stages of a partition contribute to a CutObjective, built up
// stage by stage from the end. Internal to the solvers; pure values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "planner/solvers/best_cuts.h"

namespace pipetransformer::planner {

// What the objective counts of one stage, and of the cut at its end.
struct StageTerms {
  int64_t forward = 0;
  int64_t backward = 0;
  int64_t exposed = 0;
  int64_t cut = 0;
  int64_t hiding = 0;  // part of cut
};

StageTerms
stage_terms(const CutObjective& objective, int64_t begin, int64_t end);

// Of so many steps one ends when its all-reduces do, the others with the pipe.
inline int64_t mean_end_ns(int64_t pipe, int64_t end, int64_t steps) {
  return pipe + (std::max(pipe, end) - pipe) / steps;
}

// Value = repeats * forward + the mean end: `end` is when the last of their
// all-reduces ends, where the pipe ends at repeats * backward + cuts.
struct CutTerms {
  int64_t forward = 0;   // largest
  int64_t backward = 0;  // largest
  int64_t cuts = 0;      // total
  int64_t end = 0;

  bool operator==(const CutTerms&) const = default;

  int64_t value(const CutObjective& objective) const {
    const int64_t repeats = objective.repeats;
    return repeats * forward +
           mean_end_ns(
               repeats * backward + cuts, end, objective.accumulation_steps);
  }

  // With a stage before them.
  CutTerms preceded_by(const StageTerms& stage, int64_t repeats) const {
    CutTerms all{
        std::max(forward, stage.forward),
        std::max(backward, stage.backward),
        cuts + stage.cut,
        end + stage.cut - stage.hiding};
    all.end =
        std::max(all.end, stage.exposed + repeats * all.backward + all.cuts);
    return all;
  }

  bool as_good_as(const CutTerms& other) const {
    return forward <= other.forward && backward <= other.backward &&
           cuts <= other.cuts && end <= other.end;
  }
};

}  // namespace pipetransformer::planner
