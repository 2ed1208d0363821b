#include "autocache/slab.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "autocache/process.h"
#include "core/hash.h"

namespace pipetransformer::autocache {

namespace {

using Word = std::atomic_ref<uint64_t>;

constexpr uint64_t kMagic = 0x62616c7365686361;  // "acheslab"
constexpr uint32_t kFormat = 1;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kSuperblockBytes = 4096;
constexpr std::size_t kMaxRunIdBytes = 256;        // with the closing zero
constexpr uint64_t kMaxBytes = uint64_t{1} << 56;  // sums below stay in range

// Index word: 0 none yet; slot + 1; or claimed by a process that assigns one.
constexpr uint64_t kClaimed = uint64_t{1} << 63;

uint64_t aligned(uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

[[noreturn]] void refuse(
    const std::string& what,
    const std::string& expected,
    const std::string& actual) {
  throw std::invalid_argument(
      what + ": expected " + expected + ", got " + actual);
}

uint64_t header_checksum(const RecordHeader& header) noexcept {
  return core::hash_bytes(&header, offsetof(RecordHeader, checksum));
}

uint64_t payload_checksum(std::span<const Segment> segments) noexcept {
  uint64_t hash = core::kHashSeed;
  for (const Segment& segment : segments) {
    hash = core::hash_bytes(segment.data, segment.size, hash);
  }
  return hash;
}

uint64_t payload_bytes(std::span<const Segment> segments) noexcept {
  uint64_t bytes = 0;
  for (const Segment& segment : segments) {
    bytes += padded(segment.size);
  }
  return bytes;
}

bool within_format(const RecordLayout& layout) noexcept {
  if (layout.num_tensors > kMaxTensors) {
    return false;
  }
  return std::all_of(
      layout.tensors.begin(),
      layout.tensors.end(),
      [](const TensorLayout& tensor) { return tensor.num_dims <= kMaxDims; });
}

// `text` as far as it may stand in a message: memory of others may hold
// escapes.
std::string printable(std::string_view text) {
  const bool plain = std::all_of(text.begin(), text.end(), [](char letter) {
    return letter >= ' ' && letter <= '~';
  });
  return plain ? "'" + std::string(text) + "'" : "one that is not plain text";
}

}  // namespace

uint64_t Slab::Sizes::slots_offset() const noexcept {
  return kSuperblockBytes + aligned(num_samples * sizeof(uint64_t));
}

// Whether create() makes such sizes, and `bytes` is what they need.
bool Slab::Sizes::fit(uint64_t bytes) const noexcept {
  if (num_samples == 0 || num_samples > kMaxBytes / sizeof(uint64_t) ||
      num_slots == 0 || num_slots > num_samples ||
      slot_bytes <= Slot::kOverheadBytes || slot_bytes > kMaxBytes ||
      slot_bytes % kAlignment != 0 || bytes < slots_offset()) {
    return false;
  }
  const uint64_t slots = bytes - slots_offset();
  return slots / slot_bytes == num_slots && slots % slot_bytes == 0;
}

// Written before anybody else can know the slab, and read when one attaches;
// `next_slot` is in use from then on.
struct Slab::Superblock {
  uint64_t magic;
  uint32_t format;
  uint32_t header_bytes;
  Sizes sizes;
  char run_id[kMaxRunIdBytes];
  alignas(kAlignment) uint64_t next_slot;
};

Slab Slab::create(const SlabConfig& config) {
  static_assert(sizeof(Superblock) <= kSuperblockBytes);
  if (config.run_id.empty() || config.run_id.size() >= kMaxRunIdBytes) {
    refuse(
        "run_id",
        "1 to 255 bytes",
        std::to_string(config.run_id.size()) + " bytes");
  }
  if (config.num_samples == 0 || config.num_samples > kMaxBytes / 8) {
    refuse("num_samples", "a number >= 1", std::to_string(config.num_samples));
  }
  if (config.slot_bytes <= Slot::kOverheadBytes ||
      config.slot_bytes > kMaxBytes) {
    refuse(
        "slot_bytes",
        "more than the " + std::to_string(Slot::kOverheadBytes) +
            " bytes of a record without payload",
        std::to_string(config.slot_bytes));
  }
  Superblock head{};
  head.magic = kMagic;
  head.format = kFormat;
  head.header_bytes = Slot::kOverheadBytes;
  Sizes& sizes = head.sizes;
  sizes.num_samples = config.num_samples;
  sizes.slot_bytes = aligned(config.slot_bytes);
  sizes.num_slots =
      slots_within(config.budget_bytes, config.num_samples, config.slot_bytes);
  const uint64_t fixed = sizes.slots_offset();
  if (sizes.num_slots == 0) {
    refuse(
        "budget_bytes",
        "at least " + std::to_string(fixed + sizes.slot_bytes) +
            " for one record",
        std::to_string(config.budget_bytes));
  }
  config.run_id.copy(head.run_id, kMaxRunIdBytes - 1);
  SharedMemory memory =
      SharedMemory::create(fixed + sizes.num_slots * sizes.slot_bytes);
  std::memcpy(memory.data(), &head, sizeof(head));
  return Slab(std::move(memory), sizes);
}

uint64_t Slab::slots_within(
    uint64_t budget_bytes,
    uint64_t num_samples,
    uint64_t slot_bytes) noexcept {
  if (num_samples == 0 || num_samples > kMaxBytes / sizeof(uint64_t) ||
      slot_bytes <= Slot::kOverheadBytes || slot_bytes > kMaxBytes) {
    return 0;
  }
  const Sizes sizes{num_samples, 0, aligned(slot_bytes)};
  const uint64_t budget = std::min(budget_bytes, kMaxBytes);
  const uint64_t fixed = std::min(sizes.slots_offset(), budget);
  return std::min(num_samples, (budget - fixed) / sizes.slot_bytes);
}

Slab Slab::attach(const std::string& path, const std::string& run_id) {
  SharedMemory memory = SharedMemory::open(path);
  Superblock head{};
  if (memory.size() >= kSuperblockBytes) {
    // Each word once: what is checked below is what is used. Not next_slot:
    // other processes take slots meanwhile.
    std::array<uint64_t, offsetof(Superblock, next_slot) / sizeof(uint64_t)>
        words;
    auto* from = reinterpret_cast<uint64_t*>(memory.data());
    for (uint64_t& word : words) {
      word = Word(*from++).load(std::memory_order_relaxed);
    }
    std::memcpy(&head, words.data(), sizeof(words));
  }
  if (head.magic != kMagic || head.format != kFormat ||
      head.header_bytes != Slot::kOverheadBytes ||
      !head.sizes.fit(memory.size())) {
    refuse(
        "address",
        "a cache of format " + std::to_string(kFormat),
        "memory of another format");
  }
  head.run_id[kMaxRunIdBytes - 1] = '\0';
  if (run_id != head.run_id) {
    refuse("run_id", printable(run_id), printable(head.run_id));
  }
  return Slab(std::move(memory), head.sizes);
}

Slab::Slab(SharedMemory memory, const Sizes& sizes)
    : memory_(std::move(memory)),
      sizes_(sizes),
      next_slot_(&reinterpret_cast<Superblock*>(memory_.data())->next_slot),
      index_(reinterpret_cast<uint64_t*>(memory_.data() + kSuperblockBytes)),
      slots_(memory_.data() + sizes_.slots_offset()) {}

FindResult Slab::find(uint64_t sample, Found& found) noexcept {
  const uint64_t entry = Word(index_[sample]).load(std::memory_order_acquire);
  if (entry == 0 || (entry & kClaimed) != 0) {
    return FindResult::kAbsent;
  }
  if (entry > num_slots()) {
    return FindResult::kCorrupt;
  }
  found.slot = Slot(slot_words(entry - 1));
  found.version = found.slot.version();
  if (found.version.state() != SlotState::kReady ||
      !found.slot.read_header(found.version, found.header)) {
    return FindResult::kAbsent;
  }
  const RecordHeader& header = found.header;
  if (header.checksum != header_checksum(header) || header.sample != sample ||
      header.payload_bytes > slot_bytes() - Slot::kOverheadBytes ||
      !within_format(header.layout)) {
    found.slot.discard(found.version);
    return FindResult::kCorrupt;
  }
  return FindResult::kFound;
}

ReadResult Slab::read(
    Found& found,
    std::span<const Segment> segments,
    bool verify) noexcept {
  if (payload_bytes(segments) != found.header.payload_bytes) {
    found.slot.discard(found.version);
    return ReadResult::kCorrupt;
  }
  if (!found.slot.read_payload(found.version, segments)) {
    return ReadResult::kChanged;
  }
  if (verify && payload_checksum(segments) != found.header.payload_checksum) {
    found.slot.discard(found.version);
    return ReadResult::kCorrupt;
  }
  return ReadResult::kRead;
}

WriteResult Slab::write(
    uint64_t sample,
    const RecordKey& key,
    const RecordLayout& layout,
    std::span<const Segment> segments) noexcept {
  RecordHeader header;
  header.payload_bytes = payload_bytes(segments);
  if (Slot::kOverheadBytes + header.payload_bytes > slot_bytes()) {
    return WriteResult::kFull;
  }
  Found found;
  if (find(sample, found) == FindResult::kFound && found.header.key == key) {
    return WriteResult::kSame;
  }
  const Assignment assignment = assign(sample);
  if (assignment.words == nullptr) {
    return assignment.refusal;
  }
  header.sample = sample;
  header.key = key;
  header.layout = layout;
  header.payload_checksum = payload_checksum(segments);
  header.checksum = header_checksum(header);
  Slot slot(assignment.words);
  const SlotVersion seen = slot.version();
  const bool writing = seen.state() == SlotState::kWriting;
  const uint32_t self = current_process();
  if ((writing && process_runs(seen.writer())) ||
      !slot.begin_write(seen, self)) {
    return WriteResult::kBusy;
  }
  slot.write(header, segments);
  return slot.publish(seen, self) ? WriteResult::kWritten : WriteResult::kBusy;
}

// A process claims the sample's index word before it takes a slot, so that two
// that come at once do not take two. One that dies in between loses one slot.
Slab::Assignment Slab::assign(uint64_t sample) noexcept {
  Word entry(index_[sample]);
  Word next_slot(*next_slot_);
  uint64_t seen = entry.load(std::memory_order_acquire);
  if (seen != 0 && (seen & kClaimed) == 0) {
    const bool valid = seen <= num_slots();
    return {valid ? slot_words(seen - 1) : nullptr, WriteResult::kFull};
  }
  if (seen != 0 && process_runs(static_cast<uint32_t>(seen))) {
    return {nullptr, WriteResult::kBusy};
  }
  if (next_slot.load(std::memory_order_relaxed) >= num_slots()) {
    return {nullptr, WriteResult::kFull};
  }
  if (!entry.compare_exchange_strong(
          seen, kClaimed | current_process(), std::memory_order_acq_rel)) {
    return {nullptr, WriteResult::kBusy};
  }
  const uint64_t slot = next_slot.fetch_add(1, std::memory_order_relaxed);
  if (slot >= num_slots()) {
    entry.store(0, std::memory_order_release);
    return {nullptr, WriteResult::kFull};
  }
  entry.store(slot + 1, std::memory_order_release);
  return {slot_words(slot), WriteResult::kWritten};
}

uint64_t* Slab::slot_words(uint64_t slot) const noexcept {
  return reinterpret_cast<uint64_t*>(slots_ + slot * slot_bytes());
}

}  // namespace pipetransformer::autocache
