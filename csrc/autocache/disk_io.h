// Reads and writes of blocks of one file, many at a time, without the caller
// waiting in the kernel: by io_uring where the system has it (containers often
// forbid it), else by threads. Both do the same. Torch-free.
//
// submit() and a job's functions may be called from several threads. Nothing
// throws but the functions that make a DiskIo.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "autocache/disk_meter.h"

namespace pipetransformer::autocache {

// One read or write, which holds its buffer until the system is done with it.
class DiskJob {
 public:
  using Time = std::chrono::steady_clock::time_point;

  enum class Kind { kRead, kWrite };

  DiskJob(
      Kind kind,
      std::shared_ptr<std::byte> data,
      uint64_t bytes,
      uint64_t offset) noexcept
      : kind(kind), data(std::move(data)), bytes(bytes), offset(offset) {}

  const Kind kind;
  const std::shared_ptr<std::byte> data;
  const uint64_t bytes;   // whole blocks
  const uint64_t offset;  // of the file

  // Whether it has ended by then.
  bool wait(Time deadline);
  // Of one that has ended: 0, or what the system reported.
  int error() const noexcept {
    return error_;
  }
  // Nobody waits for it any more: if it has not begun, it need not.
  void give_up() noexcept {
    wanted_ = false;
  }

  // For a DiskIo, which moves the bytes in one or several pieces.
  bool wanted() const noexcept {
    return wanted_;
  }
  uint64_t moved = 0;
  void end(int error) noexcept;
  // Counts it from now until it ends.
  void count(std::shared_ptr<DiskMeter> meter) noexcept;
  // Notes what one piece gave: bytes, 0 at the end of the file, or -errno.
  // True: the job has ended.
  bool advance(int64_t result) noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable ended_signal_;
  bool ended_ = false;                // guarded by mutex_
  std::shared_ptr<DiskMeter> meter_;  // set before it is submitted; or null
  int error_ = 0;
  std::atomic<bool> wanted_{true};
};

class DiskIo {
 public:
  virtual ~DiskIo() = default;

  // Does them all at some time, and ends each; never blocks for long.
  virtual void submit(std::span<const std::shared_ptr<DiskJob>> jobs) = 0;

  // Ends what has not begun, waits for the rest, and joins its threads. False:
  // they hang until the deadline and are left to themselves, with the buffers
  // that the system may still write to. Call it once, before destroying.
  virtual bool stop(std::chrono::milliseconds deadline) noexcept = 0;
};

// Both keep a duplicate of `descriptor`. `num_threads` > 0 threads read and
// write; throws std::system_error when the system gives none.
std::unique_ptr<DiskIo> make_thread_io(int descriptor, int num_threads);

// Null: built without liburing, or the system does not let it.
std::unique_ptr<DiskIo> make_uring_io(int descriptor);

}  // namespace pipetransformer::autocache
