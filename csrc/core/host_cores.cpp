#include "core/host_cores.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>

#include "core/cgroups.h"

namespace pipetransformer::core {

namespace {

constexpr double kUnlimitedCores = std::numeric_limits<double>::infinity();

// Both in microseconds; no quota is the word "max" in v2 and -1 in v1.
double cores(std::istream& quota_text, std::istream& period_text) {
  int64_t quota = 0, period = 0;
  const bool read = quota_text >> quota && period_text >> period;
  return read && quota > 0 && period > 0
             ? static_cast<double>(quota) / static_cast<double>(period)
             : kUnlimitedCores;
}

}  // namespace

double host_cores(const std::string& root) {
  double least = kUnlimitedCores;
  for (const auto& folder : group_folders("cgroup2", "", root)) {
    std::ifstream file(folder + "/cpu.max");
    least = std::min(least, cores(file, file));
  }
  for (const auto& folder : group_folders("cgroup", "cpu", root)) {
    std::ifstream quota(folder + "/cpu.cfs_quota_us");
    std::ifstream period(folder + "/cpu.cfs_period_us");
    least = std::min(least, cores(quota, period));
  }
  return least;
}

}  // namespace pipetransformer::core
