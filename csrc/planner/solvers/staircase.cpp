#include "planner/solvers/staircase.h"

#include <algorithm>
#include <optional>

#include "planner/solvers/reach.h"

namespace pipetransformer::planner {

namespace {

// The stairs as they are climbed: least forward under a cap on backward and the
// other way round, each starting from what the steps before have shown.
class Climb {
 public:
  Climb(
      const SpanCost& forward,
      const SpanCost& backward,
      const Rules& rules,
      int64_t num_stages)
      : reach_(rules, num_stages),
        forward_(reach_.watch(forward)),
        backward_(reach_.watch(backward)) {}

  // Least largest stage without a cap on the other; nullopt if none exist.
  std::optional<int64_t> least_forward(int64_t low) {
    return unlimited(forward_, backward_, low);
  }
  std::optional<int64_t> least_backward(int64_t low) {
    return unlimited(backward_, forward_, low);
  }

  // Least forward with backward <= cap; nullopt if above `high`.
  std::optional<int64_t>
  forward_within(int64_t backward_cap, int64_t low, int64_t high) {
    return within(forward_, backward_, backward_cap, low, high);
  }
  std::optional<int64_t>
  backward_within(int64_t forward_cap, int64_t low, int64_t high) {
    return within(backward_, forward_, forward_cap, low, high);
  }

  Cuts cuts(int64_t forward_cap, int64_t backward_cap) {
    reach_.set_cap(forward_, forward_cap);
    reach_.set_cap(backward_, backward_cap);
    return reach_.first_cuts().value();
  }

 private:
  std::optional<int64_t>
  unlimited(Reach::Handle least, Reach::Handle other, int64_t low) {
    return within(least, other, Reach::kNoCap, low, Reach::kNoCap);
  }

  std::optional<int64_t> within(
      Reach::Handle least,
      Reach::Handle other,
      int64_t cap,
      int64_t low,
      int64_t high) {
    reach_.set_cap(other, cap);
    reach_.set_cap(least, high);
    const Reach::Probe found = reach_.probe(least);
    if (!found.feasible) {
      return std::nullopt;
    }
    return reach_.least_cap(least, low, found.value);
  }

  Reach reach_;
  Reach::Handle forward_;
  Reach::Handle backward_;
};

}  // namespace

// Note [Staircase]
// F = least max forward; B = least max backward with forward <= F: a point. The
// next has B' < B: F' = least max forward with backward <= B - 1, and so on.
// Backward never gets below its own optimum, so the walk ends once F plus that
// exceeds the best sum.
std::vector<StaircasePoint> staircase(
    const SpanCost& forward,
    const SpanCost& backward,
    const Rules& rules,
    int64_t num_stages) {
  std::vector<StaircasePoint> points;
  if (num_stages < 1) {
    return points;
  }
  Climb climb(forward, backward, rules, num_stages);
  std::optional<int64_t> step =
      climb.least_forward(least_possible(forward, num_stages));
  if (!step) {
    return points;
  }
  const int64_t least_backward =
      *climb.least_backward(least_possible(backward, num_stages));
  int64_t best = Reach::kNoCap;
  int64_t backward_ns = Reach::kNoCap;
  while (step) {
    const int64_t forward_ns = *step;
    // Exists: the cuts that gave forward_ns keep backward below the last.
    backward_ns = *climb.backward_within(
        forward_ns, least_backward, std::max(least_backward, backward_ns - 1));
    best = std::min(best, forward_ns + backward_ns);
    points.push_back(
        {forward_ns, backward_ns, climb.cuts(forward_ns, backward_ns)});
    if (backward_ns == least_backward) {
      break;
    }
    step = climb.forward_within(
        backward_ns - 1, forward_ns + 1, best - least_backward);
  }
  return points;
}

}  // namespace pipetransformer::planner
