// The cgroups that limit this process. Torch-free, thread-safe.
#pragma once

#include <string>
#include <vector>

namespace pipetransformer::core {

// The folders of this process's group and of all groups above it, as far as
// mounts show them, wherever they are; a group may come twice, and a folder
// that is removed is named all the same. Of the hierarchies of the file system
// "cgroup2", with no `controller`, or "cgroup", with a controller such as
// "memory". `root` holds another machine's `proc` and mounts. What cannot be
// read is left out.
std::vector<std::string> group_folders(
    const std::string& filesystem,
    const std::string& controller,
    const std::string& root);

}  // namespace pipetransformer::core
