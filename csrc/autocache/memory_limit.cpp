#include "autocache/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace pipetransformer::autocache {

namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

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

uint64_t left_in_group(
    const std::string& folder,
    const std::string& limit_file,
    const std::string& usage_file,
    const std::string& cache_name) {
  const auto limit = number_in(folder + limit_file);
  const auto usage = number_in(folder + usage_file);
  if (!limit || !usage) {
    return kUnlimited;
  }
  const uint64_t cached =
      number_in(folder + "memory.stat", cache_name).value_or(0);
  const uint64_t used = *usage - std::min(cached, *usage);
  return *limit - std::min(used, *limit);
}

}  // namespace

uint64_t available_memory() {
  const auto machine_kib = number_in("/proc/meminfo", "MemAvailable:");
  const uint64_t machine = machine_kib ? *machine_kib * 1024 : kUnlimited;
  return std::min(
      {machine,
       left_in_group(
           "/sys/fs/cgroup/", "memory.max", "memory.current", "inactive_file"),
       left_in_group(
           "/sys/fs/cgroup/memory/",
           "memory.limit_in_bytes",
           "memory.usage_in_bytes",
           "total_inactive_file")});
}

}  // namespace pipetransformer::autocache
