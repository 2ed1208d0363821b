// Files that a process of this user may have made, opened only after a look at
// what they are: an address may name anything, and to open a device or a FIFO
// may already do something. Torch-free; not thread-safe to move or destroy.
#pragma once

#include <sys/stat.h>

#include <string>
#include <utility>

namespace pipetransformer::autocache {

// Closes the descriptor unless it was handed on.
class Descriptor {
 public:
  explicit Descriptor(int value = -1) noexcept : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(other.release()) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor();

  int get() const noexcept {
    return value_;
  }
  int release() noexcept {
    return std::exchange(value_, -1);
  }

 private:
  int value_;
};

class OwnFile {
 public:
  // Looks at what is behind `path`. Throws std::system_error when it cannot,
  // std::invalid_argument when it is not a regular file of this user that no
  // other user may open. `wanted` says in errors what was expected; it
  // outlives the object.
  OwnFile(const std::string& path, const char* wanted);

  // Opens just that file. Throws std::system_error.
  Descriptor open(int flags) const;

  [[noreturn]] void refuse(const std::string& actual) const;

  // As it was when looked at.
  const struct stat& info() const noexcept {
    return info_;
  }
  // Without the right to read or write.
  int descriptor() const noexcept {
    return place_.get();
  }

 private:
  std::string path_;
  const char* wanted_;
  Descriptor place_;
  struct stat info_ {};
};

}  // namespace pipetransformer::autocache
