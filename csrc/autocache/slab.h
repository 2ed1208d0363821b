// Records of one id space, shared by the processes of a node: an index from
// sample to slot, and slots. Everything lives in one piece of shared memory, so
// a process that attaches sees all records without a copy.
//
//   superblock | index: one word per sample | slots, 64-byte aligned
//
// Slots are assigned first come, first served, and for ever. There is no
// eviction: each sample is read once per epoch in an order that repeats
// nothing, and under such a load any replacement does worse than keeping what
// is there. In a ragged slab a slot is as large as the first record that it
// holds, and memory is reserved as slots are assigned; a sample whose record
// outgrows its slot gets another one, and the old one is lost. Else all slots
// have one size and are reserved at once.
//
// Other processes may write anything anywhere, at any time: what is read from
// the memory is checked in a copy before it is used, so nothing outside of the
// memory is touched and what does not fit together is a miss.
//
// Thread-safe and process-safe without locks, except for moving and destroying.
// Reads and writes never throw: what is doubtful is reported as an outcome.
// Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "autocache/record.h"
#include "autocache/shared_memory.h"
#include "autocache/slot.h"

namespace pipetransformer::autocache {

struct SlabConfig {
  std::string run_id;  // names the run; at most 255 bytes
  uint64_t num_samples = 0;
  // Of the largest record, of a ragged slab of a usual one; with
  // Slot::kOverheadBytes.
  uint64_t slot_bytes = 0;
  uint64_t budget_bytes = 0;  // of everything; bounds the slots
  bool ragged = false;
};

// kBusy: somebody else writes it. kChanged: overwritten meanwhile.
enum class FindResult { kFound, kAbsent, kCorrupt };
enum class ReadResult { kRead, kChanged, kCorrupt };
enum class WriteResult { kWritten, kSame, kBusy, kFull };

class Slab {
 public:
  // A record that was there when find() looked; valid as long as its slab. Its
  // payload fits its slot, its layout fits the format; sizes and types in there
  // are only what its writer says.
  struct Found {
    Slot slot{nullptr};
    SlotVersion version{0};
    RecordHeader header;
  };

  // Throws std::invalid_argument when the budget holds no slot or a field is
  // out of range, std::system_error when the memory cannot be had.
  static Slab create(const SlabConfig& config);

  // How many slots of that size create() has room for; 0: it refuses.
  static uint64_t slots_within(
      uint64_t budget_bytes,
      uint64_t num_samples,
      uint64_t slot_bytes) noexcept;

  // Attaches to the slab behind `path`. Throws std::invalid_argument when it is
  // not of this user, run and format, std::system_error when it cannot be
  // opened.
  static Slab attach(const std::string& path, const std::string& run_id);

  // Starts to bring the header of `sample`'s record near, for find().
  void prefetch(uint64_t sample) noexcept;

  // Looks up the record of `sample` < num_samples.
  FindResult find(uint64_t sample, Found& found) noexcept;

  // Copies the payload of a found record. `segments` have the sizes of its
  // layout. With `verify` the checksum is compared, too. What is corrupt is
  // dropped.
  ReadResult
  read(Found& found, std::span<const Segment> segments, bool verify) noexcept;

  // Drops the record of `sample`, if any.
  void drop(uint64_t sample) noexcept;

  // Tells all processes that every record was dropped. To be called after the
  // last drop(): whoever takes num_clears() before reading a record that was
  // dropped has the lower number then.
  void count_clear() noexcept;

  // How often that was told. To be compared only: others may write anything.
  uint64_t num_clears() const noexcept;

  // Tells all processes that the records are not to be relied on any more.
  void give_up() noexcept;

  // Whether that was told.
  bool given_up() const noexcept;

  // Stores a record, over whatever the sample had. kSame: a record with this
  // key is there already, in an encoding that serves. kFull: no room for a
  // slot, or the record is larger than the slots are.
  WriteResult write(
      uint64_t sample,
      const RecordKey& key,
      const RecordLayout& layout,
      std::span<const Segment> segments) noexcept;

  uint64_t num_samples() const noexcept {
    return sizes_.num_samples;
  }
  // Of slot_bytes() each.
  uint64_t num_slots() const noexcept {
    return sizes_.num_slots();
  }
  uint64_t slot_bytes() const noexcept {
    return sizes_.slot_bytes;
  }
  bool ragged() const noexcept {
    return sizes_.ragged != 0;
  }
  // Of slots assigned so far, lost ones included.
  uint64_t used_bytes() const noexcept;
  int descriptor() const noexcept {
    return memory_.descriptor();
  }

 private:
  struct Sizes {
    uint64_t num_samples;
    uint64_t slot_bytes;   // aligned
    uint64_t arena_bytes;  // of all slots
    uint64_t ragged;       // 0 or 1

    uint64_t num_slots() const noexcept;
    uint64_t slots_offset() const noexcept;
    bool fit(uint64_t bytes) const noexcept;
  };
  struct Superblock;
  struct Assignment {
    uint64_t* words;      // of the slot; null: none
    WriteResult refusal;  // why there is none
  };

  // Where a slot lies in the arena.
  struct Extent {
    uint64_t begin;
    uint64_t bytes;
  };

  Slab(SharedMemory memory, const Sizes& sizes);

  std::optional<Extent> extent_of(uint64_t entry) const noexcept;
  bool is_there(const Extent& extent) noexcept;
  uint64_t* words_of(const Extent& extent) const noexcept;
  std::optional<Extent> take(uint64_t bytes) noexcept;
  Assignment assign(uint64_t sample, uint64_t record_bytes) noexcept;

  SharedMemory memory_;
  Sizes sizes_;           // checked; never read from memory_ again
  uint64_t* next_byte_;   // of the arena, not assigned yet; in memory_
  uint64_t* num_clears_;  // in memory_
  uint64_t* given_up_;    // in memory_
  uint64_t* index_;       // in memory_
  std::byte* slots_;      // in memory_
};

}  // namespace pipetransformer::autocache
