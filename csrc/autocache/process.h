// Tells whether a process of this pid namespace still runs. Torch-free,
// thread-safe (no state).
#pragma once

#include <cstdint>

namespace pipetransformer::autocache {

// The calling process; asked anew each time, because a fork changes it.
uint32_t current_process() noexcept;

// False once the process was killed, also while nobody has reaped it. A process
// that got the number of a dead one counts as that one. True when it cannot be
// told (no descriptor left): the memory of a process that runs must not be
// taken over. Costs a file read.
bool process_runs(uint32_t pid) noexcept;

}  // namespace pipetransformer::autocache
