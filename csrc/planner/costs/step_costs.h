// What a step costs, stage by stage and per micro-batch: the plain values that
// schedules are timed with, by the planner's formulas and by the simulator.
//
// int64 nanoseconds and bytes, no behaviour, thread-safe as values. Times of
// stages are means over the micro-batches, whose sizes differ by at most one
// row; those of copies and of the prefix are of the largest, as bytes are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pipetransformer::planner {

enum class ScheduleKind { kGPipe, kOneFOneB, kZbH1 };

// Where the frozen layers run. Replicated: every device of the replica holds
// them all and runs its share of the micro-batches. Pipelined: each device
// holds a part, micro-batches pass them in turn. Filled: every device holds
// them all, and runs those of the next step, which do not depend on this one's
// update, while it waits for other stages.
enum class PrefixPlacement { kNone, kReplicated, kPipelined, kFilled };

// Where the frozen layers' outputs are read from instead of being computed.
// Of equally fast ones the first is taken: device memory is the scarcest.
enum class CacheTier { kNone, kHost, kDisk, kDevice };

struct StageCosts {
  // Per micro-batch. B of a schedule takes input_grad_ns + weight_grad_ns.
  int64_t forward_ns = 0;
  int64_t recompute_ns = 0;  // R, for micro-batches that have one
  int64_t input_grad_ns = 0;
  int64_t weight_grad_ns = 0;
  int64_t forward_copy_ns = 0;   // outputs to the next stage; 0 for the last
  int64_t backward_copy_ns = 0;  // gradients to the stage before; 0 for first
  bool has_backward = true;      // false: nothing at or before it trains

  // After the stage's last gradient of the batch that ends an optimizer step.
  int64_t all_reduce_ns = 0;
  // Its last part: on the network card that the stages of a node share.
  int64_t network_all_reduce_ns = 0;

  // Bytes on the stage's device: always, and per micro-batch kept from F to
  // the end of B (or of I), from R to the end of B (or of I), and from I to W.
  int64_t state_bytes = 0;
  int64_t kept_bytes = 0;
  int64_t recomputed_bytes = 0;
  int64_t kept_for_weights_bytes = 0;
  int64_t shared_bytes = 0;  // kept in a step by all its micro-batches together
  // Gradients beside those in state_bytes: from the end of the first B or W,
  // and at the end of each later one.
  int64_t summed_gradient_bytes = 0;
  int64_t passing_gradient_bytes = 0;
};

struct StepCosts {
  ScheduleKind schedule = ScheduleKind::kGPipe;
  int64_t num_microbatches = 1;
  int64_t num_recomputed = 0;  // leading micro-batches that have an R
  std::vector<StageCosts> stages;

  // The frozen prefix, before the first forward. Replicated: one entry, the
  // whole prefix per micro-batch. Pipelined: one per device, its part. Filled:
  // one entry, not before the first forward, but in gaps.
  PrefixPlacement prefix_placement = PrefixPlacement::kNone;
  std::vector<int64_t> prefix_ns;
  int64_t prefix_grain_ns =
      0;                       // filled: the longest of what is not interrupted
  int64_t prefix_copy_ns = 0;  // of one micro-batch between two devices
  // Reads from the cache that overlap with the step, which lasts no less.
  int64_t cache_read_ns = 0;
  // Reads that come before the prefix of what misses, and the first forward.
  int64_t cache_wait_ns = 0;

  // What each replica's process does on one device when all else has ended:
  // its part of the optimizer's step, loading rows, bookkeeping.
  int64_t process_ns = 0;

  // Batches that share an optimizer step, of which the last one's gradients are
  // reduced. A step here is a batch: what is timed is the mean of them.
  int64_t accumulation_steps = 1;

  // Devices of a node that run at full speed together, in thousandths (0: all);
  // beyond that they share cores. And the replicas that do so.
  int64_t cores_permille = 0;
  int64_t replicas_per_node = 1;
};

}  // namespace pipetransformer::planner
