#include "autocache/own_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace pipetransformer::autocache {

Descriptor::~Descriptor() {
  if (value_ >= 0) {
    ::close(value_);
  }
}

OwnFile::OwnFile(const std::string& path, const char* wanted)
    : path_(path),
      wanted_(wanted),
      place_(::open(path.c_str(), O_PATH | O_CLOEXEC)) {
  if (place_.get() < 0 || ::fstat(place_.get(), &info_) != 0) {
    throw std::system_error(errno, std::generic_category(), "open " + path);
  }
  if (!S_ISREG(info_.st_mode)) {
    refuse("no file");
  }
  if (info_.st_uid != ::geteuid()) {
    refuse("a file of user " + std::to_string(info_.st_uid));
  }
  if ((info_.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    refuse("a file that other users may open");
  }
}

Descriptor OwnFile::open(int flags) const {
  const std::string same = "/proc/self/fd/" + std::to_string(place_.get());
  Descriptor file(::open(same.c_str(), flags | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    throw std::system_error(errno, std::generic_category(), "open " + path_);
  }
  return file;
}

void OwnFile::refuse(const std::string& actual) const {
  throw std::invalid_argument(
      std::string("address: expected ") + wanted_ + ", got " + actual + " at " +
      path_);
}

}  // namespace pipetransformer::autocache
