#include "core/host_memory.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

namespace pipetransformer::core {

namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// A kind of memory cgroup: how to recognize it, and what its files are called.
struct Kind {
  const char* filesystem;
  const char* controller;  // in /proc/self/cgroup and as a mount option; or ""
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

// A mounted hierarchy: the group `top`, and all below it, are seen at `point`.
struct Mount {
  std::string top;  // empty: the topmost
  std::string point;
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

// Whether `word` is in a comma-separated list.
bool listed(std::string_view list, std::string_view word) {
  const std::string all = "," + std::string(list) + ",";
  return all.find("," + std::string(word) + ",") != std::string::npos;
}

// Without the octal escapes of /proc/self/mountinfo, as in "my\040folder".
std::string unescaped(const std::string& text) {
  const auto digit = [&](std::size_t at) {
    return at < text.size() && text[at] >= '0' && text[at] <= '7'
               ? text[at] - '0'
               : -1;
  };
  std::string plain;
  for (std::size_t k = 0; k < text.size(); ++k) {
    const int high = digit(k + 1), middle = digit(k + 2), low = digit(k + 3);
    if (text[k] == '\\' && high >= 0 && middle >= 0 && low >= 0) {
      plain += static_cast<char>(high * 64 + middle * 8 + low);
      k += 3;
    } else {
      plain += text[k];
    }
  }
  return plain;
}

// "36 31 0:33 /top /point options [more] - filesystem source options"
std::vector<Mount> mounts_of(const Kind& kind, const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string skipped, top, point, field, filesystem;
    fields >> skipped >> skipped >> skipped >> top >> point;
    while (fields >> field && field != "-") {
    }
    fields >> filesystem;
    const auto options = line.substr(line.rfind(' ') + 1);
    if (fields && filesystem == kind.filesystem &&
        (*kind.controller == '\0' || listed(options, kind.controller))) {
      mounts.push_back({top == "/" ? "" : unescaped(top), unescaped(point)});
    }
  }
  return mounts;
}

// This process's group, as "/a/b"; empty: the topmost. Of "4:cpu,memory:/a/b".
std::string own_group(const Kind& kind, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const auto first = line.find(':');
    const auto second =
        first == std::string::npos ? first : line.find(':', first + 1);
    if (second != std::string::npos &&
        listed(line.substr(first + 1, second - first - 1), kind.controller)) {
      const std::string group = line.substr(second + 1);
      return group == "/" ? "" : group;
    }
  }
  return "";
}

// Where below its point a mount shows `group`; nothing if it does not. A group
// outside of this process's cgroup namespace has a name like "/../a".
std::optional<std::string>
place_in(const Mount& mount, const std::string& group) {
  if (group.rfind(mount.top, 0) != 0) {
    return std::nullopt;
  }
  const std::string place = group.substr(mount.top.size());
  const bool below = place.empty() || place.front() == '/';
  const bool outside = (place + "/").find("/../") != std::string::npos;
  return below && !outside ? std::optional(place) : std::nullopt;
}

void count(HostMemory& memory, const Kind& kind, const std::string& folder) {
  const std::string stat = folder + "/memory.stat";
  // Of v1, it has the limits of the groups above, also of those not shown.
  uint64_t limit =
      number_in(stat, "hierarchical_memory_limit").value_or(kUnlimited);
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

void count_groups(
    HostMemory& memory,
    const Kind& kind,
    const std::string& root) {
  const std::string group = own_group(kind, root);
  const std::vector<Mount> mounts = mounts_of(kind, root);
  bool found = false;
  for (const Mount& mount : mounts) {
    if (auto place = place_in(mount, group)) {
      found = true;
      for (; !place->empty(); place->erase(place->rfind('/'))) {
        count(memory, kind, root + mount.point + *place);
      }
      count(memory, kind, root + mount.point);
    }
  }
  if (!found) {
    // What a container is shown is its own, whatever the names say.
    for (const Mount& mount : mounts) {
      count(memory, kind, root + mount.point);
    }
  }
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
    count_groups(memory, kind, root);
  }
  return memory;
}

}  // namespace pipetransformer::core
