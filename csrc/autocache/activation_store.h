// Moves activations between batch tensors and the slab: gathers the records of
// a batch's samples straight into new tensors, scatters new activations into
// slots. What the slab has no room for goes to a disk tier, if there is one.
//
// Thread-safe; close() may run alongside a fetch, which then ends undisturbed.
// All tensors are on the CPU (store() copies others there). Work is spread over
// the intra-op threads. Ids out of range and tensors whose first dims differ
// throw std::invalid_argument / c10::ValueError; whatever may be wrong with a
// record makes a miss and a count instead, and want of memory a miss alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "autocache/codec.h"
#include "autocache/disk_tier.h"
#include "autocache/slab.h"
#include "autocache/tensor_rows.h"

namespace pipetransformer::autocache {

// Rows of one tensor as records hold them, for the ops of codec_ops.h: some
// encoded, the others native.
struct EncodedTensor {
  at::Tensor bytes;            // (bytes) uint8
  at::Tensor offsets;          // (rows) int64, multiples of 8
  at::Tensor codecs;           // (rows) uint8
  std::vector<int64_t> sizes;  // of a row, with padding
  at::ScalarType dtype = at::kFloat;
  std::optional<double> fill;  // behind rows; nothing: they are not ragged
};

using RowsTensor = std::variant<at::Tensor, EncodedTensor>;

// Records of equal boundary and, apart from lengths and codecs, layout:
// `tensors[k]` is (rows.numel(), ...), and `rows` (int64) are the positions in
// the batch, in ascending order.
struct RecordGroup {
  int64_t boundary = 0;
  at::Tensor rows;
  at::Tensor
      lengths;  // (rows.numel()) int64, of ragged records; else undefined
  std::vector<RowsTensor> tensors;
  bool lossy = false;  // some record was not native
};

// Rows since construction, in this process. hits + misses are the rows asked
// for; stale, changed, corrupt and late ones are among the misses, as are those
// that have no record. stored + skipped + full are the rows given to store().
struct CacheCounts {
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t stale = 0;    // of another prefix or codec, or overwritten meanwhile
  int64_t changed = 0;  // of another input
  int64_t corrupt = 0;
  int64_t stored = 0;
  int64_t skipped = 0;  // there already, or being written by somebody else
  int64_t full = 0;     // no slot left, or larger than one, and no room on disk
  int64_t disk_hits = 0;  // of the hits, those that were on disk
  int64_t late = 0;       // on disk, and not read in time or with an error
};

// How ragged records become tensors again.
struct Padding {
  std::vector<double> fills;  // per tensor; empty: ragged records are stale
  int64_t length = -1;        // -1: of the longest record found
};

// Records that were written to a file, or read from one.
struct FileCounts {
  int64_t records = 0;  // whole ones
  int64_t damaged = 0;  // or not of this id space
  int64_t taken = 0;    // stored; the others were there, or have no room
  int64_t left = 0;     // had no room, or could not be read from disk in time
  int64_t bytes = 0;    // of the file
};

// Records in an open file, from bytes `begin` to `end`.
struct RecordFile {
  int descriptor = -1;
  uint64_t begin = 0;
  uint64_t end = 0;
};

class ActivationStore {
 public:
  // With `verify_all` every read compares the checksum, else every 64th.
  ActivationStore(Slab slab, bool verify_all);

  // `ids` (rows) int64; chain[b] is the fingerprint of the prefix of b layers,
  // and a record is valid when chain[its boundary] is its fingerprint.
  // `input_hashes` (rows) int64: compared with the records' when given. Ragged
  // records longer than the padding's length are of another input. Records
  // encoded by another codec than the given one are misses, and without
  // `use_disk` those on disk. With `encoded`, tensors of which a row is encoded
  // are returned so; decode_rows() takes all of these rows.
  std::vector<RecordGroup> fetch(
      const at::Tensor& ids,
      const std::vector<uint64_t>& chain,
      const std::optional<at::Tensor>& input_hashes,
      const Padding& padding = {},
      Codec codec = Codec::kNative,
      bool use_disk = true,
      bool encoded = false);

  // Stores row k of every tensor (rows, ...) as the record of ids[k], of ragged
  // tensors its first lengths[k] elements of dim 1, encoded as far as the codec
  // takes them; without `use_disk` in the slab alone. Rows of encoded tensors
  // are stored as they are, which is for kNative alone. Returns the number of
  // rows written.
  int64_t store(
      const at::Tensor& ids,
      const std::vector<RowsTensor>& tensors,
      uint32_t boundary,
      uint64_t fingerprint,
      const std::optional<at::Tensor>& input_hashes,
      const RaggedTensors& ragged = {},
      const std::optional<at::Tensor>& lengths = std::nullopt,
      Codec codec = Codec::kNative,
      bool use_disk = true);

  // Appends all records to a file behind its first `begin` bytes, and from an
  // older one those of the other samples: if some of it had no room here
  // (`incomplete`), or if records on disk cannot be read in time. Throws
  // std::system_error.
  FileCounts save(
      int descriptor,
      uint64_t begin,
      const std::optional<RecordFile>& older = std::nullopt,
      bool incomplete = false) const;

  // Takes from bytes `begin` to `end` of a file what samples have a record
  // there and none here. Throws std::system_error.
  FileCounts load(int descriptor, uint64_t begin, uint64_t end);

  // Gives what the slab has no room for a place on disk; once, before others
  // use the store. Throws c10::ValueError unless it is for as many samples.
  void add_disk(DiskIndex index, const DiskOptions& options);

  // Starts to read what of these samples is on disk.
  void prefetch(const std::vector<int64_t>& samples);

  CacheCounts counts() const noexcept;

  // Drops all records, for all processes.
  void clear();

  // How often any process did. Records that were read before the
  // number changed may be of those that were dropped.
  int64_t num_clears() const;

  // Tells all processes that the records are not to be relied on any more.
  void give_up();

  // Whether any process did.
  bool given_up() const;

  // Lets go of slab and disk; every other use afterwards is a c10::ValueError.
  void close() noexcept;

  int64_t num_samples() const;
  int64_t num_slots() const;
  int64_t slot_bytes() const;
  int64_t used_bytes() const;
  int descriptor() const;
  // Null: there is none.
  std::shared_ptr<DiskTier> disk() const;

 private:
  struct Counters {
    std::atomic<int64_t> hits{0}, misses{0}, stale{0}, changed{0}, corrupt{0};
    std::atomic<int64_t> stored{0}, skipped{0}, full{0}, disk_hits{0}, late{0};
  };

  struct Batch;

  std::shared_ptr<Slab> slab() const;
  bool verify_next() noexcept;
  std::vector<int64_t> read_disk(
      Batch& batch,
      const std::vector<int64_t>& rows,
      std::vector<DiskTier::Request>& requests);
  RecordGroup gather(
      Batch& batch,
      const std::vector<int64_t>& rows,
      const Padding& padding,
      bool encoded);

  mutable std::mutex mutex_;  // guards both, not what they point to
  std::shared_ptr<Slab> slab_;
  std::shared_ptr<DiskTier> disk_;
  const bool verify_all_;
  std::atomic<uint64_t> num_reads_{0};
  Counters counters_;
};

// What load() would find in a file.
FileCounts check_records(int descriptor, uint64_t begin, uint64_t end);

// Bytes of a slot for one row of each of `tensors` (rows, ...).
int64_t record_bytes(const std::vector<at::Tensor>& tensors);

}  // namespace pipetransformer::autocache
