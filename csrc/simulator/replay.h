// Times a task graph: when each task starts and ends on its resource.
//
// Discrete events in int64 nanoseconds: no clock, no randomness, equal graphs
// give equal times. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "simulator/task_graph.h"

namespace pipetransformer::simulator {

struct Span {
  int32_t task = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// Work that may run anywhere at any time, in grains: a resource that stands
// still with none of its tasks ready takes a grain. A grain is not interrupted,
// so it may delay a task that becomes ready meanwhile.
struct FillWork {
  int64_t total_ns = 0;  // over all resources
  int64_t grain_ns = 1;
  std::vector<int32_t> resources;  // who takes grains; not empty
};

struct FillSpan {
  int32_t resource = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

struct Replay {
  std::vector<Span> spans;  // by task
  std::vector<FillSpan> fills;
  int64_t fill_left_ns = 0;  // not done when the last task ended
};

// Throws what TaskGraph::check throws.
Replay replay(const TaskGraph& graph, const FillWork& fill = {});

}  // namespace pipetransformer::simulator
