// Devices that share cores, as the slots of a host do: when more of them work
// than there are cores, each gets its share and all slow down alike.
//
// Pure; thread-safe. Equal shares slow everything that runs at an instant by
// the same factor, so the order of events stays, and only time is stretched.
#pragma once

#include <cstdint>

#include "simulator/replay.h"
#include "simulator/step_tasks.h"

namespace pipetransformer::simulator {

struct Sharing {
  // In thousandths: how many devices run at full speed together; 0: all.
  int64_t cores_permille = 0;
  // Replicas that do at any time what each simulated one does.
  int64_t replicas_each = 1;
  bool reads_compute = false;  // reads from the cache take a core
};

// Moves all begins and ends to where they come with so many cores. An instant
// with n working devices lasts max(1, n replicas_each / cores) times as long.
void share_cores(
    Replay& replay,
    const StepTasks& tasks,
    const Sharing& sharing);

}  // namespace pipetransformer::simulator
