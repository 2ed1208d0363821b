#include "autocache/activation_store.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <exception>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "autocache/codec_ops.h"
#include "autocache/encoded_rows.h"
#include "autocache/record_file.h"
#include "autocache/tensor_rows.h"

namespace pipetransformer::autocache {

namespace {

constexpr uint64_t kVerifyEvery = 64;
constexpr int64_t kLookahead = 2;          // rows
constexpr std::size_t kReadTogether = 32;  // records on disk, to be kept
// For all that a slow disk reads late while records are saved.
constexpr std::chrono::seconds kSavePatience{10};

// A flat int64 argument, one value per row.
at::Tensor
row_values(const at::Tensor& values, const char* name, int64_t rows) {
  TORCH_CHECK_VALUE(
      values.dim() == 1 && values.scalar_type() == at::kLong &&
          (rows < 0 || values.numel() == rows),
      name,
      ": expected an int64 tensor of shape (",
      rows < 0 ? std::string("rows") : std::to_string(rows),
      ",), got ",
      values.scalar_type(),
      " of shape ",
      values.sizes());
  return values.cpu().contiguous();
}

at::Tensor sample_ids(const at::Tensor& ids, const Slab& slab) {
  at::Tensor checked = row_values(ids, "ids", -1);
  const auto limit = static_cast<int64_t>(slab.num_samples());
  const auto* id = checked.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < checked.numel(); ++row) {
    TORCH_CHECK_VALUE(
        id[row] >= 0 && id[row] < limit,
        "ids: expected sample ids in 0..",
        limit - 1,
        ", got ",
        id[row]);
  }
  return checked;
}

RecordKey key_of(
    uint32_t boundary,
    uint64_t fingerprint,
    const int64_t* input_hashes,
    int64_t row) {
  RecordKey key;
  key.boundary = boundary;
  key.fingerprint = fingerprint;
  if (input_hashes != nullptr) {
    key.has_input_hash = 1;
    key.input_hash = static_cast<uint64_t>(input_hashes[row]);
  }
  return key;
}

bool of_prefix(const RecordKey& key, const std::vector<uint64_t>& chain) {
  return key.boundary < chain.size() && key.fingerprint == chain[key.boundary];
}

bool of_input(const RecordKey& key, const int64_t* input_hashes, int64_t row) {
  return input_hashes == nullptr ||
         key == key_of(key.boundary, key.fingerprint, input_hashes, row);
}

// A plain tensor, or one of the same shape and type without memory.
at::Tensor without_values(const RowsTensor& tensor) {
  if (const auto* one = std::get_if<at::Tensor>(&tensor)) {
    return *one;
  }
  const auto& encoded = std::get<EncodedTensor>(tensor);
  std::vector<int64_t> sizes = encoded.sizes;
  sizes.insert(sizes.begin(), encoded.offsets.numel());
  return at::empty(
      sizes, at::TensorOptions().dtype(encoded.dtype).device(at::kMeta));
}

// Whether rows of this layout can be padded so. Of a record of length 0 no
// payload vouches for the other sizes: a position takes no more than a slot.
bool fits(
    const RecordLayout& layout,
    const Padding& padding,
    uint64_t slot_bytes) {
  const bool ragged = std::any_of(
      layout.tensors.begin(),
      layout.tensors.end(),
      [](const TensorLayout& tensor) { return tensor.ragged != 0; });
  if (!ragged) {
    return true;
  }
  const std::optional<uint32_t> length = length_of(layout);
  if (!length || padding.fills.empty() ||
      (padding.length >= 0 && *length > padding.length)) {
    return false;
  }
  if (*length > 0) {
    return true;
  }
  const std::optional<uint64_t> one = payload_bytes(with_length(layout, 1));
  return one && *one <= slot_bytes;
}

double fill_of(const Padding& padding, std::size_t k) {
  return padding.fills[std::min(k, padding.fills.size() - 1)];
}

// Whether torch has tensors of this layout, which fits the padding, and fills
// them so. Takes no memory to speak of: where that is wanting, nothing is wrong
// with a record.
bool has_tensors(const RecordLayout& layout, const Padding& padding) {
  try {
    for (uint32_t k = 0; k < layout.num_tensors; ++k) {
      const at::Tensor empty = empty_tensor(layout.tensors[k], 0);
      if (layout.tensors[k].ragged != 0) {
        // Of one value it is cast, whatever the type holds.
        at::full({2}, fill_of(padding, k), empty.options());
      }
    }
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

// Rows of a batch whose records differ in nothing but lengths and codecs.
struct Kind {
  uint32_t boundary;
  RecordLayout layout;  // without both
  std::vector<int64_t> rows;
};

// The kind of a record among those seen so far, of which there are few.
Kind& kind_of(const RecordHeader& header, std::vector<Kind>& kinds) {
  static_assert(std::has_unique_object_representations_v<RecordLayout>);
  const RecordLayout layout = decoded(with_length(header.layout, 0));
  for (Kind& kind : kinds) {
    if (kind.boundary == header.key.boundary &&
        std::memcmp(&kind.layout, &layout, sizeof(layout)) == 0) {
      return kind;
    }
  }
  kinds.push_back({header.key.boundary, layout, {}});
  return kinds.back();
}

// What stands behind the end of a short row: copied from one padded row.
class Tails {
 public:
  Tails(
      const std::vector<at::Tensor>& tensors,
      const RaggedTensors& ragged,
      const Padding& padding) {
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      if (is_ragged(ragged, k)) {
        rows_[k] = at::full(
            tensors[k].sizes().slice(1),
            fill_of(padding, k),
            tensors[k].options());
        length_ = tensors[k].size(1);
      }
    }
  }

  // `segments`: what was read of one row, of `length` elements of dim 1.
  void fill(const std::array<Segment, kMaxTensors>& segments, int64_t length)
      const noexcept {
    for (std::size_t k = 0; k < kMaxTensors; ++k) {
      if (rows_[k].defined() && length < length_) {
        const std::size_t rest =
            rows_[k].nbytes() / length_ * (length_ - length);
        std::memcpy(
            segments[k].data + segments[k].size,
            rows_[k].const_data_ptr(),
            rest);
      }
    }
  }

 private:
  std::array<at::Tensor, kMaxTensors> rows_;
  int64_t length_ = 0;
};

// The tensors of a group that are returned encoded.
class EncodedTensors {
 public:
  // Of these rows' layouts, padded as `whole`, where a codec is used.
  EncodedTensors(
      const std::vector<const RecordLayout*>& rows,
      const RecordLayout& whole,
      const Padding& padding) {
    const auto num_rows = static_cast<int64_t>(rows.size());
    for (uint32_t k = 0; k < whole.num_tensors; ++k) {
      const bool any = std::any_of(
          rows.begin(), rows.end(), [k](const RecordLayout* layout) {
            return layout->tensors[k].codec != Codec::kNative;
          });
      if (!any) {
        continue;
      }
      EncodedTensor& tensor = tensors_[k].emplace();
      tensor.sizes = sizes_of(whole.tensors[k]);
      tensor.dtype = static_cast<at::ScalarType>(whole.tensors[k].dtype);
      tensor.offsets = at::empty({num_rows}, at::kLong);
      tensor.codecs = at::empty({num_rows}, at::kByte);
      auto* offset = tensor.offsets.mutable_data_ptr<int64_t>();
      auto* codec = tensor.codecs.mutable_data_ptr<uint8_t>();
      std::size_t bytes = 0;
      for (const RecordLayout* layout : rows) {
        *offset++ = static_cast<int64_t>(bytes);
        *codec++ = static_cast<uint8_t>(layout->tensors[k].codec);
        bytes += padded(stored_bytes(layout->tensors[k]).value());
      }
      tensor.bytes = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
      if (whole.tensors[k].ragged != 0) {
        tensor.fill = fill_of(padding, k);
      }
    }
  }

  bool has(std::size_t k) const noexcept {
    return tensors_[k].has_value();
  }

  // Where a record's tensors are to be read, as far as they are encoded ones.
  void place(
      int64_t row,
      const RecordLayout& layout,
      std::array<Segment, kMaxTensors>& segments) const {
    for (std::size_t k = 0; k < kMaxTensors; ++k) {
      if (has(k)) {
        segments[k] = {at(k, row), stored_bytes(layout.tensors[k]).value()};
      }
    }
  }

  // Whether what was read there can be decoded.
  bool valid(int64_t row, const RecordLayout& layout) const noexcept {
    for (std::size_t k = 0; k < kMaxTensors; ++k) {
      const TensorLayout& tensor = layout.tensors[k];
      if (tensor.codec != Codec::kNative &&
          !is_encoded(tensor.codec, shape_of(tensor), at(k, row))) {
        return false;
      }
    }
    return true;
  }

  EncodedTensor take(std::size_t k) {
    return std::move(tensors_[k]).value();
  }

 private:
  std::byte* at(std::size_t k, int64_t row) const noexcept {
    return static_cast<std::byte*>(tensors_[k]->bytes.mutable_data_ptr()) +
           tensors_[k]->offsets.const_data_ptr<int64_t>()[row];
  }

  std::array<std::optional<EncodedTensor>, kMaxTensors> tensors_;
};

// Writes records to the slab, and to disk what has no room there. A sample has
// one record: the one that another tier still has is older. Not thread-safe.
class Writes {
 public:
  Writes(Slab& slab, DiskTier* disk) : slab_(slab) {
    if (disk != nullptr) {
      disk_ = disk;
      on_disk_.emplace(*disk);
    }
  }

  WriteResult
  add(uint64_t sample,
      const RecordKey& key,
      const RecordLayout& layout,
      std::span<const Segment> segments) {
    const WriteResult result = slab_.write(sample, key, layout, segments);
    if (disk_ == nullptr) {
      return result;
    }
    if (result != WriteResult::kFull) {
      disk_->drop(sample);
      return result;
    }
    const WriteResult lower = on_disk_->add(sample, key, layout, segments);
    if (lower == WriteResult::kWritten || lower == WriteResult::kSame) {
      slab_.drop(sample);
      under_way_ += lower == WriteResult::kWritten ? 1 : 0;
    }
    return lower;
  }

  // Waits, and returns how many of those written have been lost on the way.
  int64_t finish() {
    const auto arrived =
        static_cast<int64_t>(on_disk_ ? on_disk_->finish() : 0);
    return std::exchange(under_way_, 0) - arrived;
  }

 private:
  Slab& slab_;
  DiskTier* disk_ = nullptr;
  std::optional<DiskTier::Writes> on_disk_;
  int64_t under_way_ = 0;
};

}  // namespace

// The records of a batch that were found, in the slab or on disk.
struct ActivationStore::Batch {
  const std::shared_ptr<Slab> slab;
  const std::shared_ptr<DiskTier> disk;  // null: there is none
  std::vector<Slab::Found> found;  // by row; headers of all, wherever they were
  std::vector<DiskTier::Record> from_disk;  // by row; empty: all in the slab

  bool on_disk(int64_t row) const noexcept {
    return !from_disk.empty() && from_disk[row];
  }

  ReadResult
  read(int64_t row, std::span<const Segment> segments, bool verify) noexcept {
    return on_disk(row) ? disk->read(from_disk[row], segments)
                        : slab->read(found[row], segments, verify);
  }

  // Reads a record with encoded tensors; `targets` are those of its row.
  ReadResult read_encoded(
      int64_t row,
      const std::array<Segment, kMaxTensors>& targets,
      bool verify,
      RowCodec& codec) {
    const RecordLayout& layout = found[row].header.layout;
    std::array<Segment, kMaxTensors> places;
    const ReadResult result =
        read(row, codec.places_of(layout, targets, places), verify);
    if (result == ReadResult::kRead && !codec.decode(layout, targets)) {
      discard(row);
      return ReadResult::kCorrupt;
    }
    return result;
  }

  void discard(int64_t row) noexcept {
    if (on_disk(row)) {
      disk->discard(from_disk[row]);
    } else {
      found[row].slot.discard(found[row].version);
    }
  }

  void prefetch(int64_t row) const noexcept {
    if (!on_disk(row)) {
      found[row].slot.prefetch(
          Slot::kOverheadBytes + found[row].header.payload_bytes);
    }
  }
};

ActivationStore::ActivationStore(Slab slab, bool verify_all)
    : slab_(std::make_shared<Slab>(std::move(slab))), verify_all_(verify_all) {}

std::vector<RecordGroup> ActivationStore::fetch(
    const at::Tensor& ids,
    const std::vector<uint64_t>& chain,
    const std::optional<at::Tensor>& input_hashes,
    const Padding& padding,
    Codec codec,
    bool use_disk,
    bool encoded) {
  Batch batch{slab(), use_disk ? disk() : nullptr, {}, {}};
  const at::Tensor samples = sample_ids(ids, *batch.slab);
  const int64_t num_rows = samples.numel();
  at::Tensor hashes;
  if (input_hashes) {
    hashes = row_values(*input_hashes, "input_hashes", num_rows);
  }
  const int64_t* hash =
      input_hashes ? hashes.const_data_ptr<int64_t>() : nullptr;
  const auto* sample = samples.const_data_ptr<int64_t>();

  std::vector<Kind> kinds;
  // Takes a record whose header was found; else returns what counts the miss.
  const auto refusal = [&](int64_t row) -> std::atomic<int64_t>* {
    const RecordHeader& header = batch.found[row].header;
    if (payload_bytes(header.layout) != header.payload_bytes) {
      batch.discard(row);
      return &counters_.corrupt;
    }
    if (!of_input(header.key, hash, row) ||
        !fits(header.layout, padding, batch.slab->slot_bytes())) {
      return &counters_.changed;
    }
    if (!of_prefix(header.key, chain) || !readable_with(header.layout, codec)) {
      return &counters_.stale;
    }
    kind_of(header, kinds).rows.push_back(row);
    return nullptr;
  };
  for (int64_t row = 0; row < num_rows; ++row) {
    batch.slab->prefetch(static_cast<uint64_t>(sample[row]));
  }
  batch.found.resize(num_rows);
  std::vector<DiskTier::Request> requests;
  std::vector<int64_t> requested;  // rows
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto id = static_cast<uint64_t>(sample[row]);
    const FindResult result = batch.slab->find(id, batch.found[row]);
    std::atomic<int64_t>* missed =
        result == FindResult::kCorrupt ? &counters_.corrupt : nullptr;
    if (result == FindResult::kFound) {
      missed = refusal(row);
      if (missed == nullptr) {
        continue;
      }
    }
    // What outgrew its slot is on disk, and an older record still in the slab.
    DiskIndex::Found on_disk;
    if (batch.disk != nullptr && batch.disk->find(id, on_disk)) {
      const RecordKey& key = on_disk.key;
      missed = !of_input(key, hash, row) ? &counters_.changed
               : !of_prefix(key, chain)  ? &counters_.stale
                                         : nullptr;
      if (missed == nullptr) {
        requests.emplace_back().sample = id;
        requests.back().found = on_disk;
        requested.push_back(row);
      }
    }
    if (missed != nullptr) {
      ++*missed;
    }
  }
  for (const int64_t row : read_disk(batch, requested, requests)) {
    if (std::atomic<int64_t>* missed = refusal(row)) {
      ++*missed;
    }
  }
  for (Kind& kind : kinds) {
    if (!requested.empty()) {  // those from the disk came last
      std::sort(kind.rows.begin(), kind.rows.end());
    }
  }
  std::sort(kinds.begin(), kinds.end(), [](const Kind& one, const Kind& other) {
    return std::tie(one.boundary, one.layout) <
           std::tie(other.boundary, other.layout);
  });
  std::vector<RecordGroup> result;
  int64_t hits = 0;
  for (const Kind& kind : kinds) {
    if (!has_tensors(kind.layout, padding)) {
      for (const int64_t row : kind.rows) {
        batch.discard(row);
      }
      counters_.corrupt += static_cast<int64_t>(kind.rows.size());
      continue;
    }
    try {
      RecordGroup group = gather(batch, kind.rows, padding, encoded);
      hits += group.rows.numel();
      if (group.rows.numel() > 0) {
        result.push_back(std::move(group));
      }
    } catch (const std::exception&) {
      // There is no memory for the tensors: plain misses, and the records stay.
    }
  }
  counters_.hits += hits;
  counters_.misses += num_rows - hits;
  return result;
}

// Brings records into memory, and returns the rows of those that are.
std::vector<int64_t> ActivationStore::read_disk(
    Batch& batch,
    const std::vector<int64_t>& rows,
    std::vector<DiskTier::Request>& requests) {
  std::vector<int64_t> read;
  if (requests.empty()) {
    return read;
  }
  batch.disk->fetch(requests);
  batch.from_disk.resize(batch.found.size());
  for (std::size_t k = 0; k < requests.size(); ++k) {
    switch (requests[k].outcome) {
      case DiskTier::Outcome::kRead:
        batch.found[rows[k]].header = requests[k].record.header();
        batch.from_disk[rows[k]] = std::move(requests[k].record);
        read.push_back(rows[k]);
        break;
      case DiskTier::Outcome::kLate:
        ++counters_.late;
        break;
      case DiskTier::Outcome::kChanged:
        ++counters_.stale;
        break;
      case DiskTier::Outcome::kCorrupt:
        ++counters_.corrupt;
        break;
    }
  }
  return read;
}

// Copies the found records of `rows`, which have one boundary and, apart from
// lengths, one layout.
RecordGroup ActivationStore::gather(
    Batch& batch,
    const std::vector<int64_t>& rows,
    const Padding& padding,
    bool encoded) {
  const std::vector<Slab::Found>& found = batch.found;
  const RecordHeader& first = found[rows.front()].header;
  const auto num_rows = static_cast<int64_t>(rows.size());
  RecordGroup group;
  group.boundary = first.key.boundary;
  RaggedTensors ragged;
  for (const TensorLayout& tensor : first.layout.tensors) {
    ragged.push_back(tensor.ragged != 0);
  }
  const bool any =
      std::find(ragged.begin(), ragged.end(), true) != ragged.end();
  std::vector<int64_t> lengths(num_rows, 0);
  for (int64_t k = 0; any && k < num_rows; ++k) {
    lengths[k] = *length_of(found[rows[k]].header.layout);
  }
  const int64_t padded =
      padding.length >= 0 ? padding.length
                          : *std::max_element(lengths.begin(), lengths.end());
  const RecordLayout whole =
      with_length(first.layout, static_cast<uint32_t>(padded));
  std::vector<const RecordLayout*> layouts;
  for (const int64_t row : encoded ? rows : std::vector<int64_t>{}) {
    layouts.push_back(&found[row].header.layout);
  }
  EncodedTensors apart(layouts, whole, padding);
  std::vector<at::Tensor> tensors;
  for (uint32_t k = 0; k < whole.num_tensors; ++k) {
    tensors.push_back(
        empty_tensor(whole.tensors[k], apart.has(k) ? 0 : num_rows));
    ragged[k] = ragged[k] && !apart.has(k);
  }
  const Tails tails(tensors, ragged, padding);
  const Rows targets(tensors, ragged);
  const int64_t grain = grain_of(payload_bytes(decoded(whole)).value());
  std::vector<ReadResult> results(num_rows);
  at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    std::array<Segment, kMaxTensors> segments;
    RowCodec decoder;
    for (int64_t k = begin; k < end; ++k) {
      if (k + kLookahead < end) {
        batch.prefetch(rows[k + kLookahead]);
      }
      const RecordLayout& layout = found[rows[k]].header.layout;
      const auto parts = targets.at(k, segments, lengths[k]);
      apart.place(k, layout, segments);
      if (is_native(layout) || encoded) {
        results[k] = batch.read(rows[k], parts, verify_next());
      } else {
        results[k] =
            batch.read_encoded(rows[k], segments, verify_next(), decoder);
      }
      if (encoded && results[k] == ReadResult::kRead &&
          !apart.valid(k, layout)) {
        batch.discard(rows[k]);
        results[k] = ReadResult::kCorrupt;
      }
      tails.fill(segments, lengths[k]);
    }
  });
  std::vector<int64_t> kept;
  int64_t disk_hits = 0;
  for (int64_t k = 0; k < num_rows; ++k) {
    if (results[k] == ReadResult::kRead) {
      group.lossy = group.lossy || !is_native(found[rows[k]].header.layout);
      disk_hits += batch.on_disk(rows[k]) ? 1 : 0;
      kept.push_back(k);
    } else {
      ++(results[k] == ReadResult::kCorrupt ? counters_.corrupt
                                            : counters_.stale);
    }
  }
  const auto num_kept = static_cast<int64_t>(kept.size());
  group.rows = at::empty({num_kept}, at::kLong);
  for (int64_t k = 0; k < num_kept; ++k) {
    group.rows.mutable_data_ptr<int64_t>()[k] = rows[kept[k]];
  }
  if (any) {
    group.lengths = at::empty({num_kept}, at::kLong);
    for (int64_t k = 0; k < num_kept; ++k) {
      group.lengths.mutable_data_ptr<int64_t>()[k] = lengths[kept[k]];
    }
  }
  at::Tensor index;
  if (num_kept < num_rows) {  // rare: close the gaps
    index = at::empty({num_kept}, at::kLong);
    std::copy(kept.begin(), kept.end(), index.mutable_data_ptr<int64_t>());
  }
  const auto close = [&](at::Tensor& rows_of) {
    if (index.defined()) {
      rows_of = rows_of.index_select(0, index);
    }
  };
  for (uint32_t k = 0; k < whole.num_tensors; ++k) {
    if (apart.has(k)) {
      EncodedTensor tensor = apart.take(k);
      close(tensor.offsets);
      close(tensor.codecs);
      group.tensors.emplace_back(std::move(tensor));
    } else {
      close(tensors[k]);
      group.tensors.emplace_back(std::move(tensors[k]));
    }
  }
  counters_.disk_hits += disk_hits;
  return group;
}

int64_t ActivationStore::store(
    const at::Tensor& ids,
    const std::vector<RowsTensor>& given,
    uint32_t boundary,
    uint64_t fingerprint,
    const std::optional<at::Tensor>& input_hashes,
    const RaggedTensors& ragged,
    const std::optional<at::Tensor>& lengths,
    Codec codec,
    bool use_disk) {
  const std::shared_ptr<Slab> slab = this->slab();
  const std::shared_ptr<DiskTier> disk = use_disk ? this->disk() : nullptr;
  const at::Tensor samples = sample_ids(ids, *slab);
  std::vector<at::Tensor> tensors;
  for (const RowsTensor& tensor : given) {
    tensors.push_back(without_values(tensor));
  }
  const int64_t num_rows = num_rows_of(tensors);
  TORCH_CHECK_VALUE(
      samples.numel() == num_rows,
      "ids: expected one per row of the tensors (",
      num_rows,
      "), got ",
      samples.numel());
  at::Tensor hashes;
  if (input_hashes) {
    hashes = row_values(*input_hashes, "input_hashes", num_rows);
  }
  const std::optional<at::Tensor> row_lengths =
      checked_lengths(tensors, ragged, lengths);
  const std::optional<RecordLayout> layout = layout_of(tensors, ragged);
  if (!layout) {
    counters_.full += num_rows;
    return 0;
  }
  std::vector<at::Tensor> sources;
  std::array<std::vector<RowPlace>, kMaxTensors> encoded;  // empty: it is plain
  std::array<at::Tensor, kMaxTensors> bytes;
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    if (const auto* one = std::get_if<at::Tensor>(&given[k])) {
      sources.push_back(plain(*one));
      continue;
    }
    TORCH_CHECK_VALUE(
        codec == Codec::kNative,
        "codec: expected native for what is encoded already");
    const auto& each = std::get<EncodedTensor>(given[k]);
    encoded[k] = check_decode_rows_args(
        each.bytes,
        each.offsets,
        each.codecs,
        is_ragged(ragged, k) ? row_lengths : std::nullopt,
        each.sizes,
        each.dtype,
        0.0);
    bytes[k] = each.bytes.cpu().contiguous();
    sources.push_back(empty_tensor(layout->tensors[k], 0));
  }
  const int64_t* hash =
      input_hashes ? hashes.const_data_ptr<int64_t>() : nullptr;
  const int64_t* length =
      row_lengths ? row_lengths->const_data_ptr<int64_t>() : nullptr;
  const auto* sample = samples.const_data_ptr<int64_t>();
  const Rows rows(sources, ragged);
  std::atomic<int64_t> stored{0};
  std::atomic<int64_t> full{0};
  at::parallel_for(
      0, num_rows, grain_of(sources), [&](int64_t begin, int64_t end) {
        std::array<Segment, kMaxTensors> segments;
        RowCodec encoder;
        Writes writes(*slab, disk.get());
        int64_t written = 0;
        int64_t refused = 0;
        for (int64_t row = begin; row < end; ++row) {
          const int64_t valid = length != nullptr ? length[row] : 0;
          const auto parts = rows.at(row, segments, valid);
          RecordLayout kept =
              with_length(*layout, static_cast<uint32_t>(valid));
          for (uint32_t k = 0; k < kept.num_tensors; ++k) {
            if (!encoded[k].empty()) {
              kept.tensors[k] = encoded[k][row].layout;
              segments[k] = {
                  static_cast<std::byte*>(bytes[k].mutable_data_ptr()) +
                      encoded[k][row].offset,
                  stored_bytes(kept.tensors[k]).value()};
            }
          }
          if (codec != Codec::kNative) {
            encoder.encode(codec, kept, segments);
          }
          const WriteResult result = writes.add(
              static_cast<uint64_t>(sample[row]),
              key_of(boundary, fingerprint, hash, row),
              kept,
              parts);
          written += result == WriteResult::kWritten ? 1 : 0;
          refused += result == WriteResult::kFull ? 1 : 0;
        }
        const int64_t lost = writes.finish();
        stored += written - lost;
        full += refused + lost;
      });
  counters_.stored += stored;
  counters_.full += full;
  counters_.skipped += num_rows - stored - full;
  return stored;
}

FileCounts ActivationStore::save(
    int descriptor,
    uint64_t begin,
    const std::optional<RecordFile>& older,
    bool incomplete) const {
  const std::shared_ptr<Slab> slab = this->slab();
  const std::shared_ptr<DiskTier> disk = this->disk();
  RecordWriter writer(descriptor, begin);
  FileCounts counts;
  std::vector<bool> is_kept(slab->num_samples());
  const auto keep = [&](const RecordHeader& header, const auto& read) {
    std::array<Segment, kMaxTensors> segments;
    if (payload_bytes(header.layout) != header.payload_bytes) {
      ++counts.damaged;
      return;
    }
    std::byte* payload = writer.payload(header.payload_bytes);
    if (read(segments_of(header.layout, payload, segments)) !=
        ReadResult::kRead) {
      ++counts.damaged;
      return;
    }
    writer.add(header);
    is_kept[header.sample] = true;
    ++counts.records;
  };
  std::vector<DiskTier::Request> requests;
  const auto until = std::chrono::steady_clock::now() + kSavePatience;
  const auto keep_requested = [&] {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    disk->fetch(requests, std::max(left, std::chrono::milliseconds{0}));
    for (const DiskTier::Request& each : requests) {
      if (each.outcome == DiskTier::Outcome::kRead) {
        keep(each.record.header(), [&](std::span<const Segment> parts) {
          return disk->read(each.record, parts);
        });
      } else if (each.outcome == DiskTier::Outcome::kCorrupt) {
        ++counts.damaged;
      } else {
        ++counts.left;
      }
    }
    requests.clear();
  };
  for (uint64_t sample = 0; sample < slab->num_samples(); ++sample) {
    Slab::Found found;
    DiskTier::Request request;
    if (slab->find(sample, found) == FindResult::kFound) {
      keep(found.header, [&](std::span<const Segment> parts) {
        return slab->read(found, parts, true);
      });
    } else if (disk != nullptr && disk->find(sample, request.found)) {
      request.sample = sample;
      requests.push_back(std::move(request));
      if (requests.size() == kReadTogether) {
        keep_requested();
      }
    }
  }
  if (!requests.empty()) {
    keep_requested();
  }
  const auto copy = [&](const RecordHeader& header,
                        std::span<const Segment> from) {
    if (header.sample >= is_kept.size() || is_kept[header.sample]) {
      return;
    }
    keep(header, [&](std::span<const Segment> to) {
      for (std::size_t i = 0; i < from.size(); ++i) {
        std::memcpy(to[i].data, from[i].data, from[i].size);
      }
      return ReadResult::kRead;
    });
  };
  if (older && (incomplete || counts.left > 0)) {
    read_records(older->descriptor, older->begin, older->end, copy);
  }
  counts.bytes = static_cast<int64_t>(writer.finish());
  return counts;
}

FileCounts ActivationStore::load(int descriptor, uint64_t begin, uint64_t end) {
  const std::shared_ptr<Slab> slab = this->slab();
  const std::shared_ptr<DiskTier> disk = this->disk();
  Writes writes(*slab, disk.get());
  FileCounts counts;
  counts.bytes = static_cast<int64_t>(end);
  const auto take = [&](const RecordHeader& header,
                        std::span<const Segment> segments) {
    const uint64_t sample = header.sample;
    Slab::Found found;
    DiskIndex::Found on_disk;
    if (sample >= slab->num_samples()) {
      ++counts.damaged;
      return;
    }
    ++counts.records;
    if (slab->find(sample, found) == FindResult::kFound ||
        (disk != nullptr && disk->find(sample, on_disk))) {
      return;
    }
    if (writes.add(sample, header.key, header.layout, segments) ==
        WriteResult::kWritten) {
      ++counts.taken;
    } else {
      ++counts.left;
    }
  };
  counts.damaged +=
      static_cast<int64_t>(read_records(descriptor, begin, end, take));
  const int64_t lost = writes.finish();
  counts.taken -= lost;
  counts.left += lost;
  return counts;
}

bool ActivationStore::verify_next() noexcept {
  return verify_all_ ||
         num_reads_.fetch_add(1, std::memory_order_relaxed) % kVerifyEvery == 0;
}

CacheCounts ActivationStore::counts() const noexcept {
  return {
      counters_.hits,
      counters_.misses,
      counters_.stale,
      counters_.changed,
      counters_.corrupt,
      counters_.stored,
      counters_.skipped,
      counters_.full,
      counters_.disk_hits,
      counters_.late};
}

void ActivationStore::clear() {
  const std::shared_ptr<Slab> slab = this->slab();
  for (uint64_t sample = 0; sample < slab->num_samples(); ++sample) {
    slab->drop(sample);
  }
  if (const std::shared_ptr<DiskTier> disk = this->disk()) {
    disk->clear();
  }
  slab->count_clear();
}

int64_t ActivationStore::num_clears() const {
  return static_cast<int64_t>(slab()->num_clears());
}

void ActivationStore::give_up() {
  slab()->give_up();
}

bool ActivationStore::given_up() const {
  return slab()->given_up();
}

void ActivationStore::close() noexcept {
  std::shared_ptr<Slab> slab;
  std::shared_ptr<DiskTier> disk;
  const std::lock_guard<std::mutex> lock(mutex_);
  slab.swap(slab_);
  disk.swap(disk_);
}

std::shared_ptr<Slab> ActivationStore::slab() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(
      slab_ != nullptr, "cache: expected an open one, got a closed one");
  return slab_;
}

void ActivationStore::add_disk(DiskIndex index, const DiskOptions& options) {
  TORCH_CHECK_VALUE(
      index.num_samples() == slab()->num_samples(),
      "disk: expected records of ",
      slab()->num_samples(),
      " samples, got ",
      index.num_samples());
  auto disk = std::make_shared<DiskTier>(std::move(index), options);
  const std::lock_guard<std::mutex> lock(mutex_);
  disk_.swap(disk);
}

void ActivationStore::prefetch(const std::vector<int64_t>& samples) {
  if (const std::shared_ptr<DiskTier> disk = this->disk()) {
    disk->prefetch(samples);
  }
}

std::shared_ptr<DiskTier> ActivationStore::disk() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return disk_;
}

int64_t ActivationStore::num_samples() const {
  return static_cast<int64_t>(slab()->num_samples());
}

int64_t ActivationStore::num_slots() const {
  return static_cast<int64_t>(slab()->num_slots());
}

int64_t ActivationStore::slot_bytes() const {
  return static_cast<int64_t>(slab()->slot_bytes());
}

int64_t ActivationStore::used_bytes() const {
  return static_cast<int64_t>(slab()->used_bytes());
}

int ActivationStore::descriptor() const {
  return slab()->descriptor();
}

FileCounts check_records(int descriptor, uint64_t begin, uint64_t end) {
  FileCounts counts;
  counts.bytes = static_cast<int64_t>(end);
  counts.damaged = static_cast<int64_t>(read_records(
      descriptor,
      begin,
      end,
      [&](const RecordHeader&, std::span<const Segment>) {
        ++counts.records;
      }));
  return counts;
}

int64_t record_bytes(const std::vector<at::Tensor>& tensors) {
  std::size_t bytes = Slot::kOverheadBytes;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(
        tensor.dim() >= 1 && tensor.size(0) > 0,
        "tensors: expected at least one row, got shape ",
        tensor.sizes());
    bytes += padded(tensor.nbytes() / tensor.size(0));
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace pipetransformer::autocache
