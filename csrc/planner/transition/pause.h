// How long a change of plan stops training: one term per phase, each from a
// calibrated default until it was measured, then the mean of what was measured.
//
// Values in, values out: nothing here looks at a clock. int64 ns and bytes,
// thread-safe. What is measured on one rank must be given to all before they
// plan.
#pragma once

#include <cstdint>
#include <optional>

#include "planner/input/layer_profile.h"
#include "planner/transition/moves.h"

namespace pipetransformer::planner {

// A mean that forgets nothing and rounds once: sum of the measurements over
// the sum of what they are per (1 each, or bytes).
struct RunningMean {
  int64_t sum_ns = 0;
  int64_t count = 0;

  bool operator==(const RunningMean&) const = default;
};

// Adds a measurement of `per` units. Throws std::invalid_argument when a value
// is negative or a sum would not fit 62 bits.
RunningMean observed(const RunningMean& mean, int64_t ns, int64_t per);

struct PauseModel {
  RunningMean prepare;     // agreement of all ranks, the group is kept
  RunningMean group;       // the same with a new group alongside the live one
  RunningMean move;        // hand-over to new replicas, counted in bytes
  RunningMean compare;     // comparison of all replicas' states, part of move
  RunningMean rewire;      // modules, workers, pipeline and DDP
  RunningMean first_step;  // what the first step takes more than the others
};

// Terms of one change, in the order of its phases.
struct Pause {
  int64_t prepare_ns = 0;
  int64_t move_ns = 0;
  int64_t rewire_ns = 0;
  int64_t first_step_ns = 0;
  int64_t cache_ns = 0;

  // Saturates at 2^62.
  int64_t total_ns() const;
};

// The pause of a change of that kind; none for kNone. `cache_bytes` must be
// read again over the device link (0: nothing is lost). Unknown rates of links
// are taken as free between devices; between processes of a node as that of
// their replicas' link, and as kUnmeasuredBytesPerS without any.
Pause predicted_pause(
    const PauseModel& model,
    const Cluster& cluster,
    TransitionKind kind,
    const Moves& moves,
    int64_t cache_bytes);

}  // namespace pipetransformer::planner
