#include "autocache/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace pipetransformer::autocache {

namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// A kind of memory cgroup: where it is mounted and what its files are called.
struct Hierarchy {
  const char* mount;
  const char* controller;  // in /proc/self/cgroup; of v2 it is empty
  const char* limit_file;
  const char* usage_file;
  const char* cache_name;  // in memory.stat
};

constexpr Hierarchy kHierarchies[] = {
    {"sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"},
    {"sys/fs/cgroup/memory",
     "memory",
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     "total_inactive_file"},
};

// The number after `name` in a file of "name number" lines, or the first number
// when there is no name. Nothing when it is not there or is the word "max".
std::optional<uint64_t>
number_in(const std::string& path, const std::string& name = "") {
  std::ifstream file(path);
  std::string word;
  while (!name.empty() && word != name) {
    if (!(file >> word)) {
      return std::nullopt;
    }
  }
  uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

uint64_t left_in_group(const std::string& folder, const Hierarchy& kind) {
  const auto limit = number_in(folder + "/" + kind.limit_file);
  const auto usage = number_in(folder + "/" + kind.usage_file);
  if (!limit || !usage) {
    return kUnlimited;
  }
  const uint64_t cached =
      number_in(folder + "/memory.stat", kind.cache_name).value_or(0);
  const uint64_t used = *usage - std::min(cached, *usage);
  return *limit - std::min(used, *limit);
}

// This process's group below the mounted one, as "/a/b"; empty if it is that
// one, or if it is outside, as in a container that shows the host's names.
std::string own_group(const std::string& root, const Hierarchy& kind) {
  std::ifstream file(root + "proc/self/cgroup");
  const std::string wanted = "," + std::string(kind.controller) + ",";
  std::string line;
  while (std::getline(file, line)) {  // number:controller,controller:/path
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    const auto path = line.find('/', second + 1);
    if (first == std::string::npos || second == std::string::npos ||
        path != second + 1) {
      continue;
    }
    const std::string controllers =
        "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(path);
    if (controllers.find(wanted) != std::string::npos) {
      const bool outside = group.find("..") != std::string::npos;
      return group == "/" || outside ? "" : group;
    }
  }
  return "";
}

uint64_t left_in_groups(const std::string& root, const Hierarchy& kind) {
  const std::string mount = root + kind.mount;
  std::string group = own_group(root, kind);
  uint64_t left = left_in_group(mount, kind);
  while (!group.empty()) {
    left = std::min(left, left_in_group(mount + group, kind));
    group.erase(group.rfind('/'));
  }
  return left;
}

}  // namespace

uint64_t available_memory(const std::string& root) {
  const auto machine_kib = number_in(root + "proc/meminfo", "MemAvailable:");
  uint64_t left = machine_kib ? *machine_kib * 1024 : kUnlimited;
  for (const Hierarchy& kind : kHierarchies) {
    left = std::min(left, left_in_groups(root, kind));
  }
  return left;
}

}  // namespace pipetransformer::autocache
