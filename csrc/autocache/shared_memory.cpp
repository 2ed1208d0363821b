#include "autocache/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "autocache/own_file.h"
#include "core/host_memory.h"

namespace pipetransformer::autocache {

namespace {

// A file grows in memory by this much at once.
constexpr std::size_t kReserveBytes = std::size_t{8} << 20;

// A file that cannot shrink cannot make a reader of its mapping fault.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// The kernel would go on reserving until it kills somebody for memory. What
// cannot be looked up, for want of a descriptor, counts as none.
bool available(std::size_t bytes) noexcept {
  try {
    return bytes <= core::host_memory().available_bytes;
  } catch (const std::exception&) {
    return false;
  }
}

// Of a file in memory, those that are there. A hole counts as one that is not.
std::size_t present_bytes(int descriptor) noexcept {
  struct stat info {};
  return ::fstat(descriptor, &info) == 0
             ? static_cast<std::size_t>(info.st_blocks) * 512
             : 0;
}

// 0, or why the bytes from `begin` to `end` are not there.
int reserve_bytes(int descriptor, std::size_t begin, std::size_t end) noexcept {
  int error = EINTR;
  while (error == EINTR) {
    error = ::posix_fallocate(
        descriptor, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  }
  return error;
}

}  // namespace

SharedMemory SharedMemory::create(std::size_t size) {
  return create_sparse(size, size);
}

SharedMemory
SharedMemory::create_sparse(std::size_t size, std::size_t reserved) {
  if (!available(reserved)) {
    fail(
        ENOMEM,
        "reserve " + std::to_string(reserved) +
            " bytes of shared memory with " +
            std::to_string(core::host_memory().available_bytes) + " available");
  }
  Descriptor file(
      ::memfd_create("pipetransformer-cache", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) {
    fail(errno, "memfd_create");
  }
  if (::fchmod(file.get(), S_IRUSR | S_IWUSR) != 0) {
    fail(errno, "fchmod");
  }
  if (::ftruncate(file.get(), static_cast<off_t>(size)) != 0) {
    fail(errno, "make " + std::to_string(size) + " bytes of shared memory");
  }
  const int error = reserved > 0 ? reserve_bytes(file.get(), 0, reserved) : 0;
  if (error != 0) {
    fail(
        error,
        "reserve " + std::to_string(reserved) + " bytes of shared memory");
  }
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) {
    fail(errno, "seal shared memory");
  }
  return SharedMemory(file.release(), size, reserved);
}

SharedMemory SharedMemory::open(const std::string& path) {
  const OwnFile place(path, "sealed shared memory of this user");
  struct statfs system {};
  if (::fstatfs(place.descriptor(), &system) != 0) {
    fail(errno, "open " + path);
  }
  // Huge pages have seals as well, but touching one may be a SIGBUS.
  if (system.f_type != TMPFS_MAGIC) {
    place.refuse("a file that is not in ordinary memory");
  }
  Descriptor file = place.open(O_RDWR);
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    place.refuse("a file without the seals");
  }
  struct stat info {};
  if (::fstat(file.get(), &info) != 0 || info.st_size <= 0) {
    place.refuse("an empty file");
  }
  return SharedMemory(
      file.release(), static_cast<std::size_t>(info.st_size), 0);
}

bool SharedMemory::reserve(std::size_t end) noexcept {
  std::size_t reserved = reserved_.load(std::memory_order_relaxed);
  if (end <= reserved) {
    return true;
  }
  // In pieces. What other processes have reserved is there, and takes no
  // memory.
  const std::size_t present = present_bytes(descriptor_);
  while (reserved < end) {
    const std::size_t ahead =
        std::min(size_, (reserved / kReserveBytes + 1) * kReserveBytes);
    const std::size_t there = std::max(reserved, present);
    if ((ahead > there && !available(ahead - there)) ||
        reserve_bytes(descriptor_, reserved, ahead) != 0) {
      return false;
    }
    reserved = ahead;
  }
  std::size_t known = reserved_.load(std::memory_order_relaxed);
  while (known < reserved && !reserved_.compare_exchange_weak(
                                 known, reserved, std::memory_order_relaxed)) {
  }
  return true;
}

SharedMemory::SharedMemory(
    int descriptor,
    std::size_t size,
    std::size_t reserved)
    : descriptor_(descriptor), size_(size), reserved_(reserved) {
  void* data =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    ::close(descriptor);
    fail(error, "map " + std::to_string(size) + " bytes of shared memory");
  }
  data_ = static_cast<std::byte*>(data);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      reserved_(other.reserved_.load()) {}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) {
    ::munmap(data_, size_);
  }
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

}  // namespace pipetransformer::autocache
