// How fast a disk moves bytes for one process: those that have been moved, with
// the time in which any were under way. Thread-safe. Torch-free.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

namespace pipetransformer::autocache {

class DiskMeter {
 public:
  struct Total {
    uint64_t bytes = 0;
    std::chrono::nanoseconds busy{0};
  };

  // Of one read or write.
  void begin() noexcept;
  void end(uint64_t bytes) noexcept;

  // With the time, and without the bytes, of what is under way.
  Total total() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  mutable std::mutex mutex_;
  uint64_t under_way_ = 0;
  Clock::time_point since_;  // something has been
  Total total_;
};

}  // namespace pipetransformer::autocache
