#include "autofreeze/alpha_cap.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace pipetransformer::autofreeze {

namespace {

// Note [Real state of the cap]
// x(T) stays a real number and only phi(T) is rounded up. Rounding the state
// itself gives another schedule: 0 4 7 9 10 11 12 for L = 12, alpha = 1/3,
// where the rule says 0 4 7 9 10 11 11 12. The slack keeps the rounding error
// of double precision from freezing one unit too many: 0.3 * 10 computes as
// 3.0000000000000004, whose ceiling is 4.
constexpr double kSlack = 1e-9;

template <typename T>
[[noreturn]] void
refuse(std::string_view what, std::string_view property, const T& got) {
  std::ostringstream text;
  text << what << ": expected " << property << ", got " << got;
  throw std::invalid_argument(text.str());
}

void check_rule(const AlphaCapRule& rule) {
  check_alpha(rule.alpha);
  if (rule.num_units < 0) {
    refuse("num_units", "a count >= 0", rule.num_units);
  }
  if (rule.min_active < 0 || rule.min_active > rule.num_units) {
    std::ostringstream property;
    property << "a count in [0, " << rule.num_units << "], the model's units";
    refuse("min_active", property.str(), rule.min_active);
  }
}

void check_state(const AlphaCapRule& rule, const AlphaCapState& state) {
  std::ostringstream property;
  property << "a number in [0, " << rule.num_units << "]";
  const auto num_units = static_cast<double>(rule.num_units);
  if (!(state.frozen >= 0.0 && state.frozen <= num_units)) {
    refuse("frozen", property.str(), state.frozen);
  }
  if (state.num_frozen < 0 || state.num_frozen > rule.num_units) {
    refuse("num_frozen", property.str(), state.num_frozen);
  }
}

// l*: 1-based, ties to the lower unit. Needs an active unit.
int64_t
smallest_gradient(std::span<const double> gradient_norms, int64_t num_frozen) {
  const auto active = gradient_norms.subspan(num_frozen);
  for (const double norm : active) {
    if (!std::isfinite(norm)) {
      refuse("gradient_norms", "finite values for active units", norm);
    }
  }
  const auto smallest = std::min_element(active.begin(), active.end());
  return num_frozen + 1 + (smallest - active.begin());
}

}  // namespace

void check_alpha(double alpha) {
  if (!(alpha >= 0.0 && alpha < 1.0)) {
    refuse("alpha", "a number in [0, 1)", alpha);
  }
}

AlphaCapState advance(
    const AlphaCapRule& rule,
    const AlphaCapState& state,
    std::span<const double> gradient_norms) {
  check_rule(rule);
  check_state(rule, state);
  const auto num_norms = static_cast<int64_t>(gradient_norms.size());
  if (num_norms != 0 && num_norms != rule.num_units) {
    std::ostringstream property;
    property << rule.num_units << " values, one per unit";
    refuse("gradient_norms", property.str(), num_norms);
  }
  const int64_t limit = rule.num_units - rule.min_active;
  if (state.num_frozen >= limit) {
    return state;
  }
  const auto num_units = static_cast<double>(rule.num_units);
  double frozen = state.frozen + rule.alpha * (num_units - state.frozen);
  if (num_norms != 0) {
    const int64_t unit = smallest_gradient(gradient_norms, state.num_frozen);
    frozen = std::min(frozen, static_cast<double>(unit));
  }
  frozen = std::min(frozen, static_cast<double>(limit));
  const auto whole = static_cast<int64_t>(std::ceil(frozen - kSlack));
  return {frozen, std::max(state.num_frozen, whole)};
}

}  // namespace pipetransformer::autofreeze
