// How much memory this process could still take. Torch-free, thread-safe.
#pragma once

#include <cstdint>
#include <string>

namespace pipetransformer::autocache {

// Bytes that the machine and this process's cgroups (v1 or v2, each up to the
// mounted one) can still give, counting file caches as free. What cannot be
// read does not limit. `root` holds the machine's `proc` and `sys`.
uint64_t available_memory(const std::string& root = "/");

}  // namespace pipetransformer::autocache
