// Where the records of one id space lie in a file on disk, and which of them
// are whole: an index in shared memory, beside a file without a name.
//
//   superblock | per sample: version, place, key     file: extents of blocks
//
// A record's version follows Note [Slot protocol], but stands here instead of
// before the record: a reader takes it, reads the file, and asks whether it is
// still the same. Extents are assigned first come, first served, and for ever;
// a record that outgrows its extent gets another one, and the old one is lost.
//
// The file has no name, so it goes with its last process; other processes of
// the node open it, like the index, at /proc/<pid>/fd/<number>. They may write
// anything anywhere: what the index says is checked in a copy, what is read
// from the file by its checksums (disk_tier.h).
//
// Thread-safe and process-safe without locks, except for moving and destroying.
// Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "autocache/own_file.h"
#include "autocache/record.h"
#include "autocache/shared_memory.h"
#include "autocache/slab.h"
#include "autocache/slot.h"

namespace pipetransformer::autocache {

struct DiskConfig {
  std::string run_id;     // names the run; at most 255 bytes
  std::string directory;  // where the file is made
  uint64_t num_samples = 0;
  uint64_t bytes = 0;  // of the file
  // Extents are at least as large as this: no record of at most these bytes
  // outgrows its extent.
  uint64_t least_bytes = 0;
};

class DiskIndex {
 public:
  // Records begin and end at multiples of it, as O_DIRECT asks for.
  static constexpr uint64_t kBlockBytes = 4096;

  // A record that was whole when find() looked. Place and size lie within the
  // file; the key is what its writer says.
  struct Found {
    SlotVersion version{0};
    uint64_t begin = 0;  // of the file
    uint64_t bytes = 0;  // whole blocks
    RecordKey key;
    uint64_t encodings = 0;  // as given to claim()
  };

  // A place that this process alone may write to, until it publishes or
  // abandons it.
  struct Claim {
    uint64_t sample = 0;
    SlotVersion seen{0};
    uint32_t writer = 0;
    uint64_t begin = 0;
  };

  // Makes the index and the file, all of whose bytes are there where the file
  // system can reserve them. Throws std::invalid_argument when a field is out
  // of range, std::system_error when memory or disk cannot be had.
  static DiskIndex create(const DiskConfig& config);

  // Attaches to index and file of another process. Throws std::invalid_argument
  // when they are not of this user, run and format or do not belong together,
  // std::system_error when they cannot be opened.
  static DiskIndex attach(
      const std::string& index_path,
      const std::string& file_path,
      const std::string& run_id);

  // False: no whole record of `sample` < num_samples().
  bool find(uint64_t sample, Found& found) noexcept;

  // Whether the sample's record is still the one that was found.
  bool unchanged(uint64_t sample, SlotVersion version) noexcept;

  // Drops a record that was found, unless it has changed.
  void discard(uint64_t sample, SlotVersion version) noexcept;

  // Takes room for a record of `bytes`, over whatever the sample had. kWritten:
  // write whole blocks to `claim.begin`, then publish. kSame: a record with
  // this key is there already, in the same encodings, or without any (0).
  WriteResult claim(
      uint64_t sample,
      const RecordKey& key,
      uint64_t encodings,
      uint64_t bytes,
      Claim& claim) noexcept;
  // False: another process took the place over, which counts as not stored.
  [[nodiscard]] bool publish(const Claim& claim) noexcept;
  void abandon(const Claim& claim) noexcept;

  uint64_t num_samples() const noexcept {
    return sizes_.num_samples;
  }
  uint64_t file_bytes() const noexcept {
    return sizes_.num_blocks * kBlockBytes;
  }
  // Of extents assigned so far, lost ones included.
  uint64_t used_bytes() const noexcept;
  // Reads and writes go past the page cache.
  bool direct() const noexcept {
    return sizes_.direct != 0;
  }
  int descriptor() const noexcept {
    return memory_.descriptor();
  }
  int file_descriptor() const noexcept {
    return file_.get();
  }

 private:
  struct Sizes {
    uint64_t num_samples;
    uint64_t num_blocks;    // of the file
    uint64_t least_blocks;  // of an extent
    uint64_t direct;        // 0 or 1
    uint64_t device;        // of the file
    uint64_t inode;

    bool fit(uint64_t memory_bytes) const noexcept;
  };
  struct Superblock;
  struct Extent {
    uint64_t begin;  // in blocks, like the others
    uint64_t capacity;
    uint64_t used;
  };

  DiskIndex(SharedMemory memory, Descriptor file, const Sizes& sizes);

  static uint64_t index_bytes(uint64_t num_samples) noexcept;
  uint64_t* words_of(uint64_t sample) const noexcept;
  std::optional<Extent> extent_of(const uint64_t* words) const noexcept;
  std::optional<uint64_t> take(uint64_t blocks) noexcept;

  SharedMemory memory_;
  Descriptor file_;
  Sizes sizes_;           // checked; never read from memory_ again
  uint64_t* next_block_;  // of the file, not assigned yet; in memory_
  uint64_t* index_;       // in memory_
};

}  // namespace pipetransformer::autocache
