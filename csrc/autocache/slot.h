// One slot of shared memory: a record that many processes read and overwrite
// without locks.
//
// States: EMPTY -> WRITING(process) -> READY, READY -> WRITING on overwrite,
// and READY -> EMPTY when found corrupt. Each write has the next generation. A
// reader takes the version, copies, and asks whether the version is still the
// same; if not, it threw nothing away but its copy. WRITING of a process that
// died may be taken over by the next writer.
//
// A cheap view; thread-safe and process-safe as Note [Slot protocol] in
// slot.cpp explains. Torch-free. Nothing throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "autocache/record.h"

namespace pipetransformer::autocache {

enum class SlotState : uint32_t { kEmpty = 0, kWriting = 1, kReady = 2 };

// State, writing process and generation of a slot, in one word of memory.
class SlotVersion {
 public:
  explicit SlotVersion(uint64_t word) noexcept : word_(word) {}
  SlotVersion(SlotState state, uint32_t writer, uint32_t generation) noexcept
      : word_(
            static_cast<uint64_t>(generation) << 32 |
            static_cast<uint64_t>(writer) << 2 | static_cast<uint64_t>(state)) {
  }

  SlotState state() const noexcept {
    return static_cast<SlotState>(word_ & 3);
  }
  uint32_t writer() const noexcept {
    return static_cast<uint32_t>(word_) >> 2;  // Linux pids have 22 bits
  }
  uint32_t generation() const noexcept {
    return static_cast<uint32_t>(word_ >> 32);
  }
  uint64_t word() const noexcept {
    return word_;
  }

 private:
  uint64_t word_;
};

class Slot {
 public:
  // Bytes of a slot that are not payload: version and header.
  static constexpr std::size_t kOverheadBytes =
      sizeof(uint64_t) + sizeof(RecordHeader);

  // A view of `words`, which outlive it. All zero is an EMPTY slot.
  explicit Slot(uint64_t* words) noexcept : words_(words) {}

  SlotVersion version() const noexcept;

  // Copy out. False: the slot changed since `seen`, and the copy is worthless.
  bool read_header(SlotVersion seen, RecordHeader& header) const noexcept;
  bool read_payload(SlotVersion seen, std::span<const Segment> segments)
      const noexcept;

  // Starts to bring header and payload near, as far as that pays: the caller
  // reads them a little later. `bytes` of both together.
  void prefetch(std::size_t bytes) const noexcept;

  // Takes the slot for this process; false: somebody else changed it first.
  // After true call write(), then publish() with the same two arguments.
  bool begin_write(SlotVersion seen, uint32_t writer) noexcept;
  void
  write(const RecordHeader& header, std::span<const Segment> segments) noexcept;
  // False: another process took the slot over, which counts as not stored.
  [[nodiscard]] bool
  publish(SlotVersion seen_at_begin, uint32_t writer) noexcept;

  // READY -> EMPTY, unless the slot changed since `seen`.
  void discard(SlotVersion seen) noexcept;

 private:
  uint64_t* words_;
};

}  // namespace pipetransformer::autocache
