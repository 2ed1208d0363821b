// How much of its host's memory this process's job has. Torch-free,
// thread-safe.
#pragma once

#include <cstdint>
#include <string>

namespace pipetransformer::core {

// In bytes, each at most the one before.
struct HostMemory {
  uint64_t total_bytes = 0;      // of the machine
  uint64_t limit_bytes = 0;      // what the job may use of that
  uint64_t available_bytes = 0;  // what it could still take
  std::string limited_by;  // folder of the group that sets the limit; or empty
};

// Reads the machine's memory and the limits of this process's memory cgroup and
// of all groups above it, v1 and v2, wherever they are mounted. What the kernel
// can take back (caches of files) counts as available. What cannot be read does
// not limit: a group that no mount shows, such as those above a container.
// `root` holds another machine's `proc` and mounts. Throws std::system_error
// when the machine does not tell its memory.
HostMemory host_memory(const std::string& root = "");

}  // namespace pipetransformer::core
