// How much memory this process could still take. Torch-free, thread-safe.
#pragma once

#include <cstdint>

namespace pipetransformer::autocache {

// Bytes that the machine and the container (cgroup v1 or v2) can still give,
// counting file caches as free. What cannot be read does not limit.
uint64_t available_memory();

}  // namespace pipetransformer::autocache
