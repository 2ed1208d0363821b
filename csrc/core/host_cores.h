// How many of its host's cores this process's job may use. Torch-free,
// thread-safe.
#pragma once

#include <string>

namespace pipetransformer::core {

// The processor seconds per second that this process's cgroup and all groups
// above it allow, v1 and v2, wherever they are mounted; infinite where none
// sets a limit. What cannot be read does not limit. Affinity (cpusets) is not
// looked at. `root` holds another machine's `proc` and mounts.
double host_cores(const std::string& root = "");

}  // namespace pipetransformer::core
