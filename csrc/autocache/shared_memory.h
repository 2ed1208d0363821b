// Owner of an anonymous shared file (memfd) and its mapping in this process.
//
// Anonymous memory leaves nothing behind when its processes are killed, and it
// does not depend on the size of /dev/shm. Other processes of the node map the
// same pages by opening /proc/<pid>/fd/<number> of any process that holds them.
//
// Not thread-safe to create, move or destroy; the bytes are shared by all.
// After a fork the child holds a mapping and a descriptor of its own:
// destroying them there does not touch the parent's. Torch-free.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

namespace pipetransformer::autocache {

class SharedMemory {
 public:
  // Makes `size` > 0 zero bytes that are really there: memory that runs out is
  // an error here (std::system_error), not a SIGBUS at first touch.
  static SharedMemory create(std::size_t size);

  // Makes `size` > 0 zero bytes of which only those below `reserved` are there;
  // the others are to be reserved before they are touched.
  static SharedMemory create_sparse(std::size_t size, std::size_t reserved);

  // Maps the file behind `path`, which is untouched unless it is a regular one
  // in memory that this user alone may read and write. Throws std::system_error
  // when it cannot be opened, std::invalid_argument when it is not sealed
  // memory as above. Its size is fixed from then on; its bytes its other users
  // may change at any time.
  static SharedMemory open(const std::string& path);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  // Makes sure that the bytes below `end` <= size() are there. False: the
  // memory cannot be had. Thread-safe; cheap where this process has asked
  // before.
  bool reserve(std::size_t end) noexcept;

  std::byte* data() const noexcept {
    return data_;
  }
  std::size_t size() const noexcept {
    return size_;
  }
  int descriptor() const noexcept {
    return descriptor_;
  }

 private:
  // Takes the descriptor over, also when it throws.
  SharedMemory(int descriptor, std::size_t size, std::size_t reserved);

  int descriptor_ = -1;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::atomic<std::size_t> reserved_ = 0;  // as far as this process knows
};

}  // namespace pipetransformer::autocache
