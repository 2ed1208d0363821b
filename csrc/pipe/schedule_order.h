// The order of a pipeline's work as plain data: per stage a list of operations,
// each with the counters it waits for. Torch-free, no state, thread-safe.
//
// A stage runs its list from front to back; what it must know of other stages
// is only "stage s has finished n operations of its list". A new schedule is a
// new function that fills a `ScheduleOrder` (docs/adding-a-schedule.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pipetransformer::pipe {

enum class OpKind : char { kForward = 'F', kRecompute = 'R', kBackward = 'B' };

// "Stage `stage` has finished at least `count` operations of its list."
struct StageProgress {
  int32_t stage = 0;
  int32_t count = 0;
};

struct Op {
  OpKind kind = OpKind::kForward;
  int32_t microbatch = 0;
  // Wave of the operation; what an operation waits for has a smaller clock.
  // After a failure at clock c nothing of a later clock is started.
  int32_t clock = 0;
  std::vector<StageProgress> waits;
};

using StageOrder = std::vector<Op>;
using ScheduleOrder = std::vector<StageOrder>;

// GPipe forward. Cell (i, j) starts after (i, j-1), (i-1, j) and (i-2, j+1):
// a stage runs at most one micro-batch ahead of its successor.
// Throws std::invalid_argument unless both counts are positive.
ScheduleOrder gpipe_forward(int32_t num_microbatches, int32_t num_stages);

// GPipe backward: per stage the micro-batches in reverse order. Micro-batches
// below `num_recomputed` are recomputed first, as soon as their turn comes and
// without waiting for the next stage's gradient. Stages below `first_stage`
// have nothing to do and get an empty list.
ScheduleOrder gpipe_backward(
    int32_t num_microbatches,
    int32_t num_stages,
    int32_t num_recomputed,
    int32_t first_stage);

// One line per stage, operations as kind and micro-batch: "0: F0 F1 F2".
std::string to_string(const ScheduleOrder& order);

// Throws std::logic_error when a wait names an operation that does not exist or
// whose clock is not smaller, or when clocks fall along a list. An order that
// passes can be run without deadlock.
void check_order(const ScheduleOrder& order);

}  // namespace pipetransformer::pipe
