// Whether a change of plan is worth its pause.
//
// Pure and exact: int64 inputs, 128-bit products, no clock. Thread-safe. Equal
// offers give equal verdicts on every rank. Growth (a longer pipeline after an
// unfreeze) goes by the same rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/transition/moves.h"

namespace pipetransformer::planner {

// How willing the caller is to change K, R, M and cuts.
enum class Reshape {
  kPriced,  // when the gain exceeds the price
  kAlways,  // whenever the step gets clearly shorter
  kNever,   // only when the plan in force cannot go on
};

// The rule that decided.
enum class TransitionRule {
  kCannotStay,  // accepted: the plan in force does not fit any more
  kAlways,      // accepted: shorter, and the caller asks for no price
  kPays,        // accepted: shorter, and the gain exceeds the price
  kNever,       // refused: the caller wants the plan kept
  kTooLittle,   // refused: the step is not 2 % shorter
  kCrowded,     // refused: a device would have to hold both plans
  kTooDear,     // refused: the gain does not exceed the price
  kTooSoon,     // refused: the last change of K or R is not 10 pauses ago
};

// A change on offer. "In force" means the plan in force at the new boundary.
struct Offer {
  TransitionKind kind = TransitionKind::kShape;
  std::optional<int64_t> step_in_force_ns;  // nullopt: it cannot go on
  int64_t step_ns = 0;                      // of the new plan
  int64_t remaining_steps = 0;              // for which the gain lasts
  // Wall time of steps so far over what was predicted for them, in thousandths:
  // pauses are wall time, so gains are made wall time too.
  int64_t pace_permille = 1000;
  int64_t pause_ns = 0;   // of the change
  int64_t anyway_ns = 0;  // of a boundary change that is made in any case
  int64_t hysteresis_permille = 250;
  std::optional<int64_t> since_last_ns;  // since K or R changed; nullopt: never
  bool crowded = false;
  Reshape reshape = Reshape::kPriced;
};

struct Verdict {
  bool accepted = false;
  TransitionRule rule = TransitionRule::kTooLittle;
  int64_t gain_ns_per_step = 0;  // wall time, rounded towards 0
  int64_t extra_pause_ns = 0;    // what the change adds to what happens anyway
  std::optional<int64_t> pay_back_steps;  // ceil(extra pause / gain)
};

// Throws std::invalid_argument naming a negative input.
Verdict decide(const Offer& offer);

// Index of the accepted offer that ends the remaining steps first, or without
// prices has the shortest step; the first among equals; nullopt when none is
// accepted. Offers must come from one decision.
std::optional<std::size_t> best_offer(
    const std::vector<Offer>& offers,
    const std::vector<Verdict>& verdicts);

}  // namespace pipetransformer::planner
