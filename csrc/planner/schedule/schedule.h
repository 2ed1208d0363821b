// A schedule as plain data: per stage a list of operations, each with the
// counters it waits for. Torch-free, no state, thread-safe.
//
// A stage runs its list from front to back; what it must know of other stages
// is only "stage s has finished n operations of its list". The order of the
// lists is the schedule; waits and clocks follow from it (`link`). Builders are
// in schedules.h; a schedule prints as text and parses back.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pipetransformer::planner {

enum class OpKind : char {
  kForward = 'F',
  kRecompute = 'R',   // forward again, before the backward that needs it
  kBackward = 'B',    // gradients of the stage's inputs and weights
  kInputGrad = 'I',   // first half of B: gradients of the inputs
  kWeightGrad = 'W',  // second half of B: gradients of the weights
};

// "Stage `stage` has finished at least `count` operations of its list."
struct StageProgress {
  int32_t stage = 0;
  int32_t count = 0;
};

struct Op {
  OpKind kind = OpKind::kForward;
  int32_t microbatch = 0;
  // Wave of the operation: larger than that of the operation before it in its
  // list and of what it waits for. After a failure at clock c nothing of a
  // later clock is started.
  int32_t clock = 0;
  std::vector<StageProgress> waits;
};

using StageOps = std::vector<Op>;
using Schedule = std::vector<StageOps>;

struct LinkRules {
  // F of micro-batch i on stage j also waits for F of i-2 on stage j+1: a stage
  // runs at most one micro-batch ahead of its successor.
  bool at_most_one_ahead = true;
  // R does not wait for the next stage's gradient.
  bool early_recompute = true;
};

// Fills in `waits` and `clock` of every operation from the order of the lists:
// F waits for the previous stage's F, B and I for the next stage's B or I.
// Clocks are longest paths. Throws std::invalid_argument for an operation
// that is there twice, that needs one which is missing or comes later in its
// own list, and for lists that wait for each other in a circle; the text shows
// the schedule.
void link(Schedule& schedule, const LinkRules& rules = {});

// One line per stage, operations as kind and micro-batch: "0: F0 F1 B1 B0".
std::string to_string(const Schedule& schedule);

// Reads to_string's text and links it. Throws std::invalid_argument naming the
// line for anything else, and what link throws.
Schedule parse_schedule(std::string_view text);

// Throws std::logic_error when a wait names an operation that does not exist or
// whose clock is not smaller, or when clocks do not rise along a list. What
// passes can be run without deadlock.
void check_linked(const Schedule& schedule);

struct StageOp {
  int32_t stage = 0;
  int32_t index = 0;  // in the stage's list
};

// All operations in the order of one dispatcher: by clock; at one clock
// forward operations by rising stage, the others by falling stage.
std::vector<StageOp> serial_order(const Schedule& schedule);

// The operations of a schedule without F for one dispatcher that runs several
// at once: of each micro-batch the R by rising stage, then the rest, in one
// group; all in one group where there is no R, unless `apart`. Micro-batches in
// the order of the last stage's list. Other stages have the same order of
// micro-batches.
std::vector<std::vector<StageOp>>
backward_columns(const Schedule& schedule, bool apart);

// Largest number of micro-batches, by stage, whose F has run and whose B or W
// has not, at any point of the list: what the stage keeps activations of.
// Recomputed micro-batches (those with an R) count from their R.
std::vector<int32_t> peak_live_microbatches(const Schedule& schedule);

}  // namespace pipetransformer::planner
