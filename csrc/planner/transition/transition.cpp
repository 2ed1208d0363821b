#include "planner/transition/transition.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pipetransformer::planner {

namespace {

using Wide = __int128;

constexpr int64_t kMostNs = int64_t{1} << 62;
constexpr int64_t kAcceptPercent = 98;
constexpr int64_t kPausesBetween = 10;

void require_from_zero(int64_t value, const char* what) {
  if (value < 0) {
    throw std::invalid_argument(
        std::string(what) + ": expected at least 0, got " +
        std::to_string(value));
  }
}

void check(const Offer& offer) {
  require_from_zero(offer.step_in_force_ns.value_or(0), "step in force");
  require_from_zero(offer.step_ns, "step of the new plan");
  require_from_zero(offer.remaining_steps, "remaining steps");
  require_from_zero(offer.pace_permille, "pace");
  require_from_zero(offer.pause_ns, "pause");
  require_from_zero(offer.anyway_ns, "pause of the boundary change");
  require_from_zero(offer.hysteresis_permille, "hysteresis");
  require_from_zero(offer.since_last_ns.value_or(0), "time since the last");
}

bool clearly_shorter(int64_t step_ns, int64_t in_force_ns) {
  return step_ns < in_force_ns &&
         Wide{step_ns} * 100 <= Wide{in_force_ns} * kAcceptPercent;
}

bool pays(const Offer& offer, const Verdict& verdict) {
  // 1000 x gain could overflow; against an integer the price may be rounded
  // down.
  const Wide gain = Wide{verdict.gain_ns_per_step} * offer.remaining_steps;
  const Wide price =
      Wide{verdict.extra_pause_ns} * (1000 + Wide{offer.hysteresis_permille});
  return gain > price / 1000;
}

bool too_soon(const Offer& offer) {
  return offer.kind == TransitionKind::kShape && offer.since_last_ns &&
         Wide{*offer.since_last_ns} <= Wide{offer.pause_ns} * kPausesBetween;
}

TransitionRule rule_of(const Offer& offer, const Verdict& verdict) {
  const bool priced = offer.reshape == Reshape::kPriced;
  if (!offer.step_in_force_ns) {
    return priced && offer.crowded ? TransitionRule::kCrowded
                                   : TransitionRule::kCannotStay;
  }
  if (offer.reshape == Reshape::kNever) {
    return TransitionRule::kNever;
  }
  if (!clearly_shorter(offer.step_ns, *offer.step_in_force_ns)) {
    return TransitionRule::kTooLittle;
  }
  if (!priced) {
    return TransitionRule::kAlways;
  }
  if (offer.crowded) {
    return TransitionRule::kCrowded;
  }
  if (!pays(offer, verdict)) {
    return TransitionRule::kTooDear;
  }
  return too_soon(offer) ? TransitionRule::kTooSoon : TransitionRule::kPays;
}

bool accepts(TransitionRule rule) {
  return rule == TransitionRule::kCannotStay ||
         rule == TransitionRule::kAlways || rule == TransitionRule::kPays;
}

// Wall time until the end of the remaining steps, up to a constant; without
// prices the step alone.
Wide spent_ns(const Offer& offer, const Verdict& verdict) {
  if (offer.reshape != Reshape::kPriced) {
    return offer.step_ns;
  }
  // Offers share what stays, so the most saved is the least spent. A plan that
  // cannot go on saves nothing: then the new step counts by itself.
  if (offer.step_in_force_ns) {
    return verdict.extra_pause_ns -
           Wide{verdict.gain_ns_per_step} * offer.remaining_steps;
  }
  const Wide step = Wide{offer.step_ns} * offer.pace_permille / 1000;
  return step * offer.remaining_steps + verdict.extra_pause_ns;
}

}  // namespace

Verdict decide(const Offer& offer) {
  check(offer);
  Verdict verdict;
  verdict.extra_pause_ns =
      std::max<int64_t>(offer.pause_ns - offer.anyway_ns, 0);
  if (offer.step_in_force_ns) {
    const Wide gain = Wide{*offer.step_in_force_ns} - offer.step_ns;
    const Wide wall = gain * offer.pace_permille / 1000;
    verdict.gain_ns_per_step =
        static_cast<int64_t>(std::clamp<Wide>(wall, -kMostNs, kMostNs));
  }
  if (verdict.gain_ns_per_step > 0) {
    const Wide gain = verdict.gain_ns_per_step;
    verdict.pay_back_steps =
        static_cast<int64_t>((Wide{verdict.extra_pause_ns} + gain - 1) / gain);
  }
  verdict.rule = rule_of(offer, verdict);
  verdict.accepted = accepts(verdict.rule);
  return verdict;
}

std::optional<std::size_t> best_offer(
    const std::vector<Offer>& offers,
    const std::vector<Verdict>& verdicts) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < offers.size() && i < verdicts.size(); ++i) {
    if (!verdicts[i].accepted) {
      continue;
    }
    if (!best || spent_ns(offers[i], verdicts[i]) <
                     spent_ns(offers[*best], verdicts[*best])) {
      best = i;
    }
  }
  return best;
}

}  // namespace pipetransformer::planner
