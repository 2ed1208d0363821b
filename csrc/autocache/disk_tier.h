// Records on disk, behind what the slab holds: read ahead of their use, and
// together; written a batch at a time.
//
// A record is RecordHeader | payload, from the beginning of its extent on
// (disk_index.h). Both checksums are compared on every read, so what a disk
// returns is served as it was written, or not at all.
//
// Every wait has a deadline. A read that is late makes a miss of its sample
// alone; a write that is late, and any error of a write, ends writing in this
// process, and several errors of reads in a row end reading. Nothing throws for
// what a disk does.
//
// Thread-safe. A child of a fork may destroy its copy and finds no record in
// it, since the threads that read are the parent's. Torch-free.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>

#include "autocache/disk_index.h"
#include "autocache/disk_io.h"
#include "autocache/disk_meter.h"
#include "autocache/record.h"
#include "autocache/slab.h"

namespace pipetransformer::autocache {

enum class DiskIoKind { kAny, kUring, kThreads };

struct DiskOptions {
  // For the reads of one batch, and as long again as they take at 100 MB/s.
  std::chrono::milliseconds patience{100};
  // For a write.
  std::chrono::milliseconds write_patience{5000};
  // Of records that were read ahead and not asked for yet.
  uint64_t ahead_bytes = uint64_t{256} << 20;
  DiskIoKind io = DiskIoKind::kAny;  // kAny: io_uring, else threads
};

// What a process has moved.
struct DiskTraffic {
  DiskMeter::Total reads;
  DiskMeter::Total writes;
  std::chrono::nanoseconds read_wait{0};  // of fetch()
};

class DiskTier {
 public:
  // A record in the memory of this process; its header is whole.
  class Record {
   public:
    explicit operator bool() const noexcept {
      return job_ != nullptr;
    }
    const RecordHeader& header() const noexcept {
      return header_;
    }

   private:
    friend class DiskTier;
    std::shared_ptr<DiskJob> job_;
    RecordHeader header_;
    SlotVersion version_{0};
  };

  enum class Outcome { kRead, kLate, kChanged, kCorrupt };

  // One sample of a batch: `found` by find(), the rest by fetch().
  struct Request {
    uint64_t sample = 0;
    DiskIndex::Found found;
    Outcome outcome = Outcome::kLate;
    Record record;  // with kRead
  };

  // Records that are being written. Not thread-safe.
  class Writes {
   public:
    // The tier outlives it.
    explicit Writes(DiskTier& tier) noexcept : tier_(tier) {}
    ~Writes();
    Writes(const Writes&) = delete;
    Writes& operator=(const Writes&) = delete;

    // kWritten: it is under way, and counted by finish() if it arrives. kFull:
    // also where this process writes no more.
    WriteResult
    add(uint64_t sample,
        const RecordKey& key,
        const RecordLayout& layout,
        std::span<const Segment> segments);

    // Waits for all, and returns how many have been stored.
    uint64_t finish() noexcept;

   private:
    struct Write {
      DiskIndex::Claim claim;
      std::shared_ptr<DiskJob> job;
    };

    void settle_oldest() noexcept;

    DiskTier& tier_;
    std::deque<Write> under_way_;
    uint64_t bytes_ = 0;  // under way
    uint64_t stored_ = 0;
  };

  DiskTier(DiskIndex index, const DiskOptions& options);
  // Waits a second at most for reads and writes that hang.
  ~DiskTier();
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  // Starts to read what of these samples is on disk, as far as the bound
  // allows; ids out of range are left out. What nobody has asked for while some
  // more batches were read ahead is dropped.
  void prefetch(std::span<const int64_t> samples);

  // Whether there is a whole record of `sample` < num_samples(); touches no
  // disk.
  bool find(uint64_t sample, DiskIndex::Found& found) noexcept;

  // Reads the records that were found, or takes those that were read ahead.
  // Waits `more` than the patience of a batch: for who does not train.
  void fetch(
      std::span<Request> requests,
      std::chrono::milliseconds more = std::chrono::milliseconds{0});

  // Copies the payload of a record of that sample. `segments` have the sizes of
  // its layout. What is corrupt is dropped.
  ReadResult
  read(const Record& record, std::span<const Segment> segments) noexcept;

  // Drops a record that was read and turned out to be of no use.
  void discard(const Record& record) noexcept;

  // Drops the record of `sample`, if any; all records. For all processes.
  void drop(uint64_t sample) noexcept;
  void clear() noexcept;

  const DiskIndex& index() const noexcept {
    return index_;
  }
  // Why this process reads or writes no more: an errno; 0: it does.
  int read_error() const noexcept {
    return read_error_;
  }
  int write_error() const noexcept {
    return write_error_;
  }
  // Nothing in a child of a fork.
  DiskTraffic traffic() const noexcept;
  // What moves the bytes: "io_uring", "threads", or "" before the first.
  const char* io_name() const noexcept {
    return io_name_;
  }

 private:
  struct Traffic;

  bool usable(const std::atomic<int>& error) const noexcept;
  bool submit(std::span<const std::shared_ptr<DiskJob>> jobs);
  void start_io();
  std::shared_ptr<DiskJob> read_job(const DiskIndex::Found& found);
  void judge(Request& request, std::shared_ptr<DiskJob> job);
  void note_read(int error) noexcept;
  void end_writing(int error) noexcept;

  DiskIndex index_;
  const DiskOptions options_;
  const uint32_t owner_;  // process
  std::unique_ptr<Traffic> traffic_;
  std::atomic<int> read_error_{0};
  std::atomic<int> write_error_{0};
  std::atomic<int> failed_reads_{0};  // in a row
  std::atomic<int64_t> read_wait_ns_{0};
  std::atomic<const char*> io_name_{""};
};

}  // namespace pipetransformer::autocache
