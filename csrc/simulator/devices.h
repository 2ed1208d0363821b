// What the tasks of one replica run on. Plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simulator/task_graph.h"

namespace pipetransformer::simulator {

// By stage: time on its device in thousandths of the costs' times. Empty: 1000
// on every one.
using Permille = std::vector<int64_t>;

struct Devices {
  int32_t replica = 0;
  int32_t cache = 0;
  std::vector<int32_t> compute;          // by stage
  std::vector<int32_t> forward_engine;   // into the stage
  std::vector<int32_t> backward_engine;  // into the stage
  Permille permille;

  // Rounded up.
  int64_t compute_ns(std::size_t stage, int64_t time_ns) const;
};

Devices add_devices(
    TaskGraph& graph,
    int32_t replica,
    std::size_t num_stages,
    const Permille& permille);

}  // namespace pipetransformer::simulator
