#include "core/cgroups.h"

#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

namespace pipetransformer::core {

namespace {

// A mounted hierarchy: the group `top`, and all below it, are seen at `point`.
struct Mount {
  std::string top;  // empty: the topmost
  std::string point;
};

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
std::vector<Mount> mounts_of(
    const std::string& filesystem,
    const std::string& controller,
    const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string skipped, top, point, field, found;
    fields >> skipped >> skipped >> skipped >> top >> point;
    while (fields >> field && field != "-") {
    }
    fields >> found;
    const auto options = line.substr(line.rfind(' ') + 1);
    if (fields && found == filesystem &&
        (controller.empty() || listed(options, controller))) {
      mounts.push_back({top == "/" ? "" : unescaped(top), unescaped(point)});
    }
  }
  return mounts;
}

// This process's group, as "/a/b"; empty: the topmost. Of "4:cpu,memory:/a/b".
std::string own_group(const std::string& controller, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const auto first = line.find(':');
    const auto second =
        first == std::string::npos ? first : line.find(':', first + 1);
    if (second != std::string::npos &&
        listed(line.substr(first + 1, second - first - 1), controller)) {
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

}  // namespace

std::vector<std::string> group_folders(
    const std::string& filesystem,
    const std::string& controller,
    const std::string& root) {
  const std::string group = own_group(controller, root);
  const std::vector<Mount> mounts = mounts_of(filesystem, controller, root);
  std::vector<std::string> folders;
  for (const Mount& mount : mounts) {
    if (auto place = place_in(mount, group)) {
      for (; !place->empty(); place->erase(place->rfind('/'))) {
        folders.push_back(root + mount.point + *place);
      }
      folders.push_back(root + mount.point);
    }
  }
  if (folders.empty()) {
    // What a container is shown is its own, whatever the names say.
    for (const Mount& mount : mounts) {
      folders.push_back(root + mount.point);
    }
  }
  return folders;
}

}  // namespace pipetransformer::core
