#include "autocache/activation_store.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <tuple>
#include <type_traits>
#include <utility>

#include "autocache/encoded_rows.h"
#include "autocache/record_file.h"
#include "autocache/tensor_rows.h"

namespace pipetransformer::autocache {

namespace {

constexpr uint64_t kVerifyEvery = 64;
constexpr int64_t kLookahead = 2;  // rows

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

// Reads a record with encoded tensors; `targets` are those of its row.
ReadResult read_encoded(
    Slab& slab,
    Slab::Found& found,
    const std::array<Segment, kMaxTensors>& targets,
    bool verify,
    RowCodec& codec) {
  const RecordLayout& layout = found.header.layout;
  std::array<Segment, kMaxTensors> places;
  const ReadResult result =
      slab.read(found, codec.places_of(layout, targets, places), verify);
  if (result == ReadResult::kRead && !codec.decode(layout, targets)) {
    found.slot.discard(found.version);
    return ReadResult::kCorrupt;
  }
  return result;
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
        const std::size_t which = std::min(k, padding.fills.size() - 1);
        rows_[k] = at::full(
            tensors[k].sizes().slice(1),
            padding.fills[which],
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

}  // namespace

ActivationStore::ActivationStore(Slab slab, bool verify_all)
    : slab_(std::make_shared<Slab>(std::move(slab))), verify_all_(verify_all) {}

std::vector<RecordGroup> ActivationStore::fetch(
    const at::Tensor& ids,
    const std::vector<uint64_t>& chain,
    const std::optional<at::Tensor>& input_hashes,
    const Padding& padding,
    Codec codec) {
  const std::shared_ptr<Slab> slab = this->slab();
  const at::Tensor samples = sample_ids(ids, *slab);
  const int64_t num_rows = samples.numel();
  at::Tensor hashes;
  if (input_hashes) {
    hashes = row_values(*input_hashes, "input_hashes", num_rows);
  }
  const int64_t* hash =
      input_hashes ? hashes.const_data_ptr<int64_t>() : nullptr;
  const auto* sample = samples.const_data_ptr<int64_t>();

  std::vector<Kind> kinds;
  for (int64_t row = 0; row < num_rows; ++row) {
    slab->prefetch(static_cast<uint64_t>(sample[row]));
  }
  std::vector<Slab::Found> found(num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    switch (slab->find(static_cast<uint64_t>(sample[row]), found[row])) {
      case FindResult::kAbsent:
        break;
      case FindResult::kCorrupt:
        ++counters_.corrupt;
        break;
      case FindResult::kFound: {
        const RecordHeader& header = found[row].header;
        if (payload_bytes(header.layout) != header.payload_bytes) {
          found[row].slot.discard(found[row].version);
          ++counters_.corrupt;
        } else if (
            !of_input(header.key, hash, row) ||
            !fits(header.layout, padding, slab->slot_bytes())) {
          ++counters_.changed;
        } else if (
            !of_prefix(header.key, chain) ||
            !readable_with(header.layout, codec)) {
          ++counters_.stale;
        } else {
          kind_of(header, kinds).rows.push_back(row);
        }
        break;
      }
    }
  }
  std::sort(kinds.begin(), kinds.end(), [](const Kind& one, const Kind& other) {
    return std::tie(one.boundary, one.layout) <
           std::tie(other.boundary, other.layout);
  });
  std::vector<RecordGroup> result;
  int64_t hits = 0;
  for (const Kind& kind : kinds) {
    try {
      RecordGroup group = gather(*slab, found, kind.rows, padding);
      hits += group.rows.numel();
      if (group.rows.numel() > 0) {
        result.push_back(std::move(group));
      }
    } catch (const std::exception&) {
      // torch has no such tensors, or none with such a fill.
      for (const int64_t row : kind.rows) {
        found[row].slot.discard(found[row].version);
      }
      counters_.corrupt += static_cast<int64_t>(kind.rows.size());
    }
  }
  counters_.hits += hits;
  counters_.misses += num_rows - hits;
  return result;
}

// Copies the found records of `rows`, which have one boundary and, apart from
// lengths, one layout.
RecordGroup ActivationStore::gather(
    Slab& slab,
    std::vector<Slab::Found>& found,
    const std::vector<int64_t>& rows,
    const Padding& padding) {
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
  group.tensors = empty_tensors(
      with_length(first.layout, static_cast<uint32_t>(padded)), num_rows);
  const Tails tails(group.tensors, ragged, padding);
  const Rows targets(group.tensors, ragged);
  std::vector<ReadResult> results(num_rows);
  at::parallel_for(
      0, num_rows, grain_of(group.tensors), [&](int64_t begin, int64_t end) {
        std::array<Segment, kMaxTensors> segments;
        RowCodec decoder;
        for (int64_t k = begin; k < end; ++k) {
          if (k + kLookahead < end) {
            const Slab::Found& next = found[rows[k + kLookahead]];
            next.slot.prefetch(
                Slot::kOverheadBytes + next.header.payload_bytes);
          }
          const auto parts = targets.at(k, segments, lengths[k]);
          Slab::Found& row = found[rows[k]];
          if (is_native(row.header.layout)) {
            results[k] = slab.read(row, parts, verify_next());
          } else {
            results[k] =
                read_encoded(slab, row, segments, verify_next(), decoder);
          }
          tails.fill(segments, lengths[k]);
        }
      });
  std::vector<int64_t> kept;
  for (int64_t k = 0; k < num_rows; ++k) {
    if (results[k] == ReadResult::kRead) {
      group.lossy = group.lossy || !is_native(found[rows[k]].header.layout);
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
  if (num_kept < num_rows) {  // rare: close the gaps
    at::Tensor index = at::empty({num_kept}, at::kLong);
    std::copy(kept.begin(), kept.end(), index.mutable_data_ptr<int64_t>());
    for (at::Tensor& tensor : group.tensors) {
      tensor = tensor.index_select(0, index);
    }
  }
  return group;
}

int64_t ActivationStore::store(
    const at::Tensor& ids,
    const std::vector<at::Tensor>& tensors,
    uint32_t boundary,
    uint64_t fingerprint,
    const std::optional<at::Tensor>& input_hashes,
    const RaggedTensors& ragged,
    const std::optional<at::Tensor>& lengths,
    Codec codec) {
  const std::shared_ptr<Slab> slab = this->slab();
  const at::Tensor samples = sample_ids(ids, *slab);
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
  for (const at::Tensor& tensor : tensors) {
    sources.push_back(plain(tensor));
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
        for (int64_t row = begin; row < end; ++row) {
          const int64_t valid = length != nullptr ? length[row] : 0;
          const auto parts = rows.at(row, segments, valid);
          RecordLayout kept =
              with_length(*layout, static_cast<uint32_t>(valid));
          if (codec != Codec::kNative) {
            encoder.encode(codec, kept, segments);
          }
          const WriteResult result = slab->write(
              static_cast<uint64_t>(sample[row]),
              key_of(boundary, fingerprint, hash, row),
              kept,
              parts);
          stored += result == WriteResult::kWritten ? 1 : 0;
          full += result == WriteResult::kFull ? 1 : 0;
        }
      });
  counters_.stored += stored;
  counters_.full += full;
  counters_.skipped += num_rows - stored - full;
  return stored;
}

FileCounts ActivationStore::save(int descriptor, uint64_t begin) const {
  const std::shared_ptr<Slab> slab = this->slab();
  RecordWriter writer(descriptor, begin);
  FileCounts counts;
  std::array<Segment, kMaxTensors> segments;
  for (uint64_t sample = 0; sample < slab->num_samples(); ++sample) {
    Slab::Found found;
    if (slab->find(sample, found) != FindResult::kFound) {
      continue;
    }
    const RecordHeader& header = found.header;
    if (payload_bytes(header.layout) != header.payload_bytes) {
      ++counts.damaged;
      continue;
    }
    std::byte* payload = writer.payload(header.payload_bytes);
    const auto parts = segments_of(header.layout, payload, segments);
    if (slab->read(found, parts, true) != ReadResult::kRead) {
      ++counts.damaged;
      continue;
    }
    writer.add(header);
    ++counts.records;
  }
  counts.bytes = static_cast<int64_t>(writer.finish());
  return counts;
}

FileCounts ActivationStore::load(int descriptor, uint64_t begin, uint64_t end) {
  const std::shared_ptr<Slab> slab = this->slab();
  FileCounts counts;
  counts.bytes = static_cast<int64_t>(end);
  const auto take = [&](const RecordHeader& header,
                        std::span<const Segment> segments) {
    Slab::Found found;
    if (header.sample >= slab->num_samples()) {
      ++counts.damaged;
      return;
    }
    ++counts.records;
    if (slab->find(header.sample, found) != FindResult::kFound &&
        slab->write(header.sample, header.key, header.layout, segments) ==
            WriteResult::kWritten) {
      ++counts.taken;
    }
  };
  counts.damaged +=
      static_cast<int64_t>(read_records(descriptor, begin, end, take));
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
      counters_.full};
}

void ActivationStore::clear() {
  const std::shared_ptr<Slab> slab = this->slab();
  for (uint64_t sample = 0; sample < slab->num_samples(); ++sample) {
    Slab::Found found;
    if (slab->find(sample, found) == FindResult::kFound) {
      found.slot.discard(found.version);
    }
  }
}

void ActivationStore::close() noexcept {
  std::shared_ptr<Slab> last;
  const std::lock_guard<std::mutex> lock(mutex_);
  last.swap(slab_);
}

std::shared_ptr<Slab> ActivationStore::slab() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(
      slab_ != nullptr, "cache: expected an open one, got a closed one");
  return slab_;
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
