#include "autocache/process.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <string_view>

namespace pipetransformer::autocache {

uint32_t current_process() noexcept {
  return static_cast<uint32_t>(::getpid());
}

bool process_runs(uint32_t pid) noexcept {
  std::array<char, 32> path{};
  std::snprintf(path.data(), path.size(), "/proc/%u/stat", pid);
  const int fd = ::open(path.data(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return errno != ENOENT && errno != ESRCH;
  }
  // "pid (name) state ...": the name may hold anything, so look from the end.
  std::array<char, 512> text{};
  const ssize_t size = ::read(fd, text.data(), text.size());
  const int error = errno;
  ::close(fd);
  if (size < 0) {
    return error != ESRCH;  // it may have been reaped since open()
  }
  const std::string_view stat(text.data(), static_cast<std::size_t>(size));
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string_view::npos || name_end + 2 >= stat.size()) {
    return true;
  }
  const char state = stat[name_end + 2];
  return state != 'Z' && state != 'X';
}

}  // namespace pipetransformer::autocache
