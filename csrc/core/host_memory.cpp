#include "core/host_memory.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <optional>
#include <system_error>
#include <vector>

#include "core/cgroups.h"

namespace pipetransformer::core {

namespace {

constexpr uint64_t kUnlimitedBytes = std::numeric_limits<uint64_t>::max();

// A kind of memory cgroup: which it is, and what its files are called.
struct Kind {
  const char* filesystem;
  const char* controller;
  std::vector<const char*> limits;
  const char* usage;
  std::vector<const char*> reclaimable;  // in memory.stat
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> kinds{
      {"cgroup2",
       "",
       {"memory.max", "memory.high"},  // above `high` a job comes to a crawl
       "memory.current",
       {"inactive_file", "active_file", "slab_reclaimable"}},
      {"cgroup",
       "memory",
       {"memory.limit_in_bytes"},
       "memory.usage_in_bytes",
       {"total_inactive_file", "total_active_file"}}};
  return kinds;
}

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

void count(HostMemory& memory, const Kind& kind, const std::string& folder) {
  const std::string stat = folder + "/memory.stat";
  // Of v1, it has the limits of the groups above, also of those not shown.
  uint64_t limit =
      number_in(stat, "hierarchical_memory_limit").value_or(kUnlimitedBytes);
  for (const char* name : kind.limits) {
    limit = std::min(limit, number_in(folder + "/" + name).value_or(limit));
  }
  if (limit <= memory.limit_bytes) {
    memory.limit_bytes = limit;
    memory.limited_by = folder;
  }
  uint64_t used = number_in(folder + "/" + kind.usage).value_or(0);
  for (const char* name : kind.reclaimable) {
    used -= std::min(used, number_in(stat, name).value_or(0));
  }
  memory.available_bytes =
      std::min(memory.available_bytes, limit - std::min(used, limit));
}

}  // namespace

HostMemory host_memory(const std::string& root) {
  const std::string path = root + "/proc/meminfo";
  const auto total_kib = number_in(path, "MemTotal:");
  if (!total_kib) {
    throw std::system_error(
        ENODATA,
        std::generic_category(),
        path + ": expected a line MemTotal, got none");
  }
  HostMemory memory;
  memory.total_bytes = memory.limit_bytes = *total_kib * 1024;
  memory.available_bytes = std::min(
      number_in(path, "MemAvailable:").value_or(*total_kib) * 1024,
      memory.total_bytes);
  for (const Kind& kind : kinds()) {
    for (const auto& folder :
         group_folders(kind.filesystem, kind.controller, root)) {
      count(memory, kind, folder);
    }
  }
  return memory;
}

}  // namespace pipetransformer::core
