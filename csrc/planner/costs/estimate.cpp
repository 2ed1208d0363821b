#include "planner/costs/estimate.h"

#include <algorithm>
#include <cstddef>

#include "planner/costs/prefix.h"
#include "planner/costs/rates.h"

namespace pipetransformer::planner {

namespace {

using Wide = __int128;

int64_t backward_of(const StageCosts& stage) {
  return stage.input_grad_ns + stage.weight_grad_ns;
}

struct Sums {
  int64_t forward = 0;
  int64_t backward = 0;  // without recomputation
  int64_t recompute = 0;
  int64_t copies = 0;        // each once per direction
  int64_t max_forward = 0;   // of compute or copies
  int64_t max_backward = 0;  // recomputation included
  int64_t max_both = 0;
  int64_t max_all_reduce = 0;
};

Sums sums_of(const StepCosts& costs) {
  Sums sums;
  for (const StageCosts& stage : costs.stages) {
    const int64_t again = stage.recompute_ns + backward_of(stage);
    sums.forward += stage.forward_ns;
    sums.backward += backward_of(stage);
    sums.recompute += stage.recompute_ns;
    sums.copies += stage.forward_copy_ns + stage.backward_copy_ns;
    sums.max_forward =
        std::max({sums.max_forward, stage.forward_ns, stage.forward_copy_ns});
    sums.max_backward =
        std::max({sums.max_backward, again, stage.backward_copy_ns});
    sums.max_both = std::max(
        {sums.max_both,
         stage.forward_ns + again,
         stage.forward_copy_ns,
         stage.backward_copy_ns});
    sums.max_all_reduce = std::max(sums.max_all_reduce, stage.all_reduce_ns);
  }
  return sums;
}

// Note [Slack of an all-reduce]
// GPipe delivers a stage's gradients when the stage is done, at the soonest
// after all forwards, one backward of the stages from it on, and M - 1 more of
// the slowest of those; what is left of the pipe hides its all-reduce. 1F1B and
// ZB-H1 deliver when the whole call returns: nothing hides.
int64_t
reduced_end_ns(const StepCosts& costs, const Sums& sums, int64_t pipe_ns) {
  if (costs.schedule != ScheduleKind::kGPipe) {
    return pipe_ns + sums.max_all_reduce;
  }
  const int64_t rest = costs.num_microbatches - 1;
  int64_t copies = 0;
  for (const StageCosts& stage : costs.stages) {
    copies += stage.forward_copy_ns;
  }
  const int64_t forward = sums.forward + copies + rest * sums.max_forward;
  int64_t end_ns = pipe_ns;
  int64_t once = 0;
  int64_t slowest = 0;
  for (auto stage = costs.stages.rbegin(); stage != costs.stages.rend();
       ++stage) {
    once += backward_of(*stage);
    slowest = std::max(slowest, backward_of(*stage));
    end_ns = std::max(
        end_ns, forward + once + rest * slowest + stage->all_reduce_ns);
    once += stage->backward_copy_ns;
  }
  return end_ns;
}

// Of the batches that share an optimizer step one reduces.
int64_t
with_all_reduce_ns(const StepCosts& costs, const Sums& sums, int64_t pipe_ns) {
  return pipe_ns + (reduced_end_ns(costs, sums, pipe_ns) - pipe_ns) /
                       costs.accumulation_steps;
}

// F, I and W in equal stages: M s + (K - 1)(f + b - w).
int64_t zero_bubble_ns(const StepCosts& costs, const Sums& sums) {
  int64_t fill = 0;
  int64_t largest = 0;
  for (const StageCosts& stage : costs.stages) {
    const int64_t own = std::max<int64_t>(
        0, stage.forward_ns + stage.input_grad_ns - stage.weight_grad_ns);
    fill += own;
    largest = std::max(largest, own);
  }
  return costs.num_microbatches * sums.max_both + sums.copies + fill - largest;
}

int64_t pipe_estimate_ns(const StepCosts& costs, const Sums& sums) {
  const int64_t rest = costs.num_microbatches - 1;
  const int64_t once =
      sums.forward + sums.backward + sums.recompute + sums.copies;
  switch (costs.schedule) {
    case ScheduleKind::kGPipe:
      return once + rest * (sums.max_forward + sums.max_backward);
    case ScheduleKind::kOneFOneB:
      return once + rest * sums.max_both;
    case ScheduleKind::kZbH1:
      break;
  }
  return zero_bubble_ns(costs, sums);
}

// Note [What no step stays below]
// Stage k starts after one forward of the stages before it, has M of each of
// its operations to run, and (GPipe, 1F1B, where W comes with its B) one
// backward of the stages before it follows its last. One micro-batch passes all
// stages both ways; with early recomputation only the last stage's R is sure to
// be in its way. GPipe's forwards all end before its backwards begin, so the
// slowest stage of each direction counts on its own.
int64_t stage_bound_ns(const StepCosts& costs) {
  int64_t bound = 0;
  int64_t before = 0;
  int64_t after = 0;
  for (const StageCosts& stage : costs.stages) {
    int64_t own =
        costs.num_microbatches * (stage.forward_ns + backward_of(stage));
    own += costs.num_recomputed * stage.recompute_ns;
    bound = std::max(bound, before + own + after);
    before += stage.forward_ns + stage.forward_copy_ns;
    if (costs.schedule != ScheduleKind::kZbH1) {
      after += backward_of(stage);
    }
  }
  return bound;
}

int64_t pipe_bound_ns(const StepCosts& costs, const Sums& sums) {
  const StageCosts& last = costs.stages.back();
  // Of the last stage's first backward, when it is a checkpointed one.
  const bool first_recomputed = costs.num_recomputed == costs.num_microbatches;
  int64_t once = sums.forward + sums.copies;
  if (costs.schedule == ScheduleKind::kZbH1) {
    once += sums.backward;
    for (std::size_t k = 0; k < costs.stages.size(); ++k) {
      const bool splits = k > 0 && costs.stages[k - 1].has_backward;
      once -= splits ? costs.stages[k].weight_grad_ns : 0;
    }
  } else {
    once += sums.backward;
  }
  once += first_recomputed ? last.recompute_ns : 0;
  if (costs.schedule != ScheduleKind::kGPipe) {
    return std::max(once, stage_bound_ns(costs));
  }
  int64_t slowest_backward = 0;
  for (const StageCosts& stage : costs.stages) {
    const int64_t recomputed =
        (costs.num_microbatches - 1) * backward_of(stage) +
        std::max<int64_t>(0, costs.num_recomputed - 1) * stage.recompute_ns;
    slowest_backward = std::max(
        {slowest_backward,
         recomputed,
         (costs.num_microbatches - 1) * stage.backward_copy_ns});
  }
  return once + (costs.num_microbatches - 1) * sums.max_forward +
         slowest_backward;
}

// All devices' work on the cores that they share.
int64_t shared_cores_ns(const StepCosts& costs, const Sums& sums) {
  Wide work = costs.num_microbatches * Wide{sums.forward + sums.backward} +
              costs.num_recomputed * Wide{sums.recompute};
  for (const int64_t time_ns : costs.prefix_ns) {
    work += Wide{costs.num_microbatches} * time_ns;
  }
  return on_cores_ns(work, costs.cores_permille, costs.replicas_per_node);
}

// All that devices and cores have to do where frozen layers fill the gaps,
// those of the process that ends a step included.
int64_t filled_ns(const StepCosts& costs, const Sums& sums) {
  const auto devices = static_cast<int64_t>(costs.stages.size());
  const Wide work =
      costs.num_microbatches *
          (Wide{sums.forward + sums.backward} + costs.prefix_ns.front()) +
      costs.num_recomputed * Wide{sums.recompute} + costs.process_ns;
  return std::max(
      static_cast<int64_t>((work + devices - 1) / devices),
      on_cores_ns(work, costs.cores_permille, costs.replicas_per_node));
}

// The pipe with what comes before, after and alongside it.
int64_t
whole_step_ns(const StepCosts& costs, const Sums& sums, int64_t pipe_ns) {
  const int64_t prefix = prefix_phase_ns(
      costs.prefix_placement,
      costs.prefix_ns,
      static_cast<int64_t>(costs.stages.size()),
      costs.num_microbatches);
  const int64_t step =
      costs.cache_wait_ns + prefix + with_all_reduce_ns(costs, sums, pipe_ns);
  const int64_t process = std::max(
      costs.process_ns,
      on_cores_ns(
          costs.process_ns, costs.cores_permille, costs.replicas_per_node));
  if (costs.prefix_placement == PrefixPlacement::kFilled) {
    return std::max(
        {step + process, filled_ns(costs, sums), costs.cache_read_ns});
  }
  return std::max(
      std::max(step, shared_cores_ns(costs, sums)) + process,
      costs.cache_read_ns);
}

}  // namespace

int64_t estimate_ns(const StepCosts& costs) {
  const Sums sums = sums_of(costs);
  return whole_step_ns(costs, sums, pipe_estimate_ns(costs, sums));
}

int64_t lower_bound_ns(const StepCosts& costs) {
  const Sums sums = sums_of(costs);
  return whole_step_ns(costs, sums, pipe_bound_ns(costs, sums));
}

}  // namespace pipetransformer::planner
