// The freeze rule of the paper: a cap that closes a fixed share of the distance
// to the last unit at every evaluation point, optionally held back by the unit
// with the smallest gradient. Pure functions of plain values; torch-free,
// thread-safe (no state).
//
// Source: paper section 3.1, equation 1. See Note [Real state of the cap].
#pragma once

#include <cstdint>
#include <span>

namespace pipetransformer::autofreeze {

struct AlphaCapRule {
  // Share of the active units that one evaluation point may freeze, [0, 1).
  double alpha = 0.0;
  // L: number of units of the model, >= 0. The head belongs to none.
  int64_t num_units = 0;
  // Units that never freeze, counted from the back, [0, num_units].
  int64_t min_active = 0;
};

struct AlphaCapState {
  // x(T): the cap as a real number, [0, num_units].
  double frozen = 0.0;
  // phi(T): whole units frozen, [0, num_units].
  int64_t num_frozen = 0;
};

// Throws std::invalid_argument unless alpha is a number in [0, 1). At alpha = 1
// the first evaluation point would freeze everything.
void check_alpha(double alpha);

// The state after one more evaluation point:
//   cap(T) = x(T-1) + alpha (L - x(T-1))
//   x(T)   = min(l*, cap(T)) with gradient norms, else cap(T)
//   phi(T) = max(phi(T-1), ceil(x(T) - 1e-9))
// where l* is the active unit (1-based: units 1..l* freeze) with the smallest
// gradient norm; ties go to the lower unit.
//
// `gradient_norms` is empty (no gradient term) or holds one value per unit,
// finite for the active ones; those of frozen units are not read.
// Throws std::invalid_argument on a rule, state or statistic out of range.
AlphaCapState advance(
    const AlphaCapRule& rule,
    const AlphaCapState& state,
    std::span<const double> gradient_norms);

}  // namespace pipetransformer::autofreeze
