// The schedules: GPipe, 1F1B and ZB-H1. Torch-free, no state, thread-safe.
// Source: GPipe (Huang et al., 2019); 1F1B of PipeDream-Flush (Narayanan et
// al., 2021); ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2024).
#pragma once

#include <cstdint>
#include <string>

#include "planner/schedule/schedule.h"

namespace pipetransformer::planner {

struct ScheduleShape {
  int32_t num_microbatches = 1;
  int32_t num_stages = 1;
  // Micro-batches below this are checkpointed: an R before their backward.
  int32_t num_recomputed = 0;
  // Stages below this have no backward (frozen); num_stages: none has.
  int32_t first_stage = 0;
};

// All functions return linked schedules and throw std::invalid_argument unless
// the counts are positive and first_stage is in [0, num_stages].

// Forward only: F of micro-batches 0, 1, ... on every stage.
Schedule forward_pass(const ScheduleShape& shape, const LinkRules& rules = {});

// Backward only: per stage the micro-batches in reverse order, each with its R
// just before it: recomputed activations never pile up. Without the rule
// `at_most_one_ahead` all R come first, and do.
Schedule
gpipe_backward(const ScheduleShape& shape, const LinkRules& rules = {});

// Forward and backward in one list: stage j (of those with a backward) runs
// num_stages - j forwards ahead, then backward and forward in turns. Keeps
// activations of min(num_stages - j, num_microbatches) micro-batches.
Schedule one_f_one_b(const ScheduleShape& shape, const LinkRules& rules = {});

// As 1F1B, with backward split: I hands the gradient down, W fills the time in
// which the stage would wait. No stage keeps more than num_stages - first_stage
// micro-batches, 1F1B's largest. Where F, I and W take one unit each and there
// are at least as many micro-batches as stages with a backward, the whole takes
// 3 * num_microbatches + num_stages - 1 units. The lowest stage with a backward
// hands nothing down and runs B.
Schedule zb_h1(const ScheduleShape& shape, const LinkRules& rules = {});

// "gpipe" (forward and backward one after the other), "1f1b" or "zb-h1".
// Throws std::invalid_argument for another name.
Schedule make_schedule(
    const std::string& name,
    const ScheduleShape& shape,
    const LinkRules& rules = {});

}  // namespace pipetransformer::planner
