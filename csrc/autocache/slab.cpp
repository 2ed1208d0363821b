#include "autocache/slab.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "autocache/process.h"
#include "autocache/superblock.h"

namespace pipetransformer::autocache {

namespace {

using Word = std::atomic_ref<uint64_t>;

constexpr uint64_t kSlabMagic = 0x62616c7365686361;  // "acheslab"
constexpr uint32_t kSlabFormat = 4;
constexpr uint64_t kSlotAlignment = 64;
constexpr uint64_t kSlabHeadBytes = 4096;

// Index word: 0 none yet; bytes and begin of a slot, in units of the alignment;
// or claimed by a process that assigns one.
constexpr uint64_t kClaimed = uint64_t{1} << 63;
constexpr int kBeginBits = 37;
constexpr uint64_t kMaxArenaBytes = kSlotAlignment << kBeginBits;     // 8 TiB
constexpr uint64_t kMaxSlotBytes = kSlotAlignment * ((1 << 26) - 1);  // 4 GiB
constexpr uint64_t kMostSlabSamples = uint64_t{1} << 53;  // sums stay in range

uint64_t aligned(uint64_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

}  // namespace

uint64_t Slab::Sizes::slots_offset() const noexcept {
  return kSlabHeadBytes + aligned(num_samples * sizeof(uint64_t));
}

uint64_t Slab::Sizes::num_slots() const noexcept {
  return std::min(num_samples, arena_bytes / slot_bytes);
}

// Whether create() makes such sizes, and `bytes` is what they need.
bool Slab::Sizes::fit(uint64_t bytes) const noexcept {
  if (num_samples == 0 || num_samples > kMostSlabSamples ||
      slot_bytes <= Slot::kOverheadBytes || slot_bytes > kMaxSlotBytes ||
      slot_bytes % kSlotAlignment != 0 || arena_bytes < slot_bytes ||
      arena_bytes > kMaxArenaBytes || ragged > 1 ||
      bytes != slots_offset() + arena_bytes) {
    return false;
  }
  return ragged == 1 ? arena_bytes % kSlotAlignment == 0
                     : arena_bytes == num_slots() * slot_bytes;
}

// Written before anybody else can know the slab, and read when one attaches;
// from `next_byte` on it is in use from then on.
struct Slab::Superblock {
  uint64_t magic;
  uint32_t format;
  uint32_t header_bytes;
  Sizes sizes;
  char run_id[kMaxRunIdBytes];
  alignas(kSlotAlignment) uint64_t next_byte;
  uint64_t num_clears;
  uint64_t given_up;  // 0: not
};

Slab Slab::create(const SlabConfig& config) {
  static_assert(sizeof(Superblock) <= kSlabHeadBytes);
  Superblock head{};
  put_run_id(config.run_id, head.run_id);
  if (config.num_samples == 0 || config.num_samples > kMostSlabSamples) {
    refuse("num_samples", "a number >= 1", std::to_string(config.num_samples));
  }
  if (config.slot_bytes <= Slot::kOverheadBytes ||
      config.slot_bytes > kMaxSlotBytes) {
    refuse(
        "slot_bytes",
        "more than the " + std::to_string(Slot::kOverheadBytes) +
            " bytes of a record without payload, at most " +
            std::to_string(kMaxSlotBytes),
        std::to_string(config.slot_bytes));
  }
  head.magic = kSlabMagic;
  head.format = kSlabFormat;
  head.header_bytes = Slot::kOverheadBytes;
  Sizes& sizes = head.sizes;
  sizes.num_samples = config.num_samples;
  sizes.slot_bytes = aligned(config.slot_bytes);
  sizes.ragged = config.ragged ? 1 : 0;
  const uint64_t num_slots =
      slots_within(config.budget_bytes, config.num_samples, config.slot_bytes);
  const uint64_t fixed = sizes.slots_offset();
  if (num_slots == 0) {
    refuse(
        "budget_bytes",
        "at least " + std::to_string(fixed + sizes.slot_bytes) +
            " for one record",
        std::to_string(config.budget_bytes));
  }
  const uint64_t most = std::min(config.budget_bytes - fixed, kMaxArenaBytes);
  sizes.arena_bytes = config.ragged ? most / kSlotAlignment * kSlotAlignment
                                    : num_slots * sizes.slot_bytes;
  const uint64_t size = fixed + sizes.arena_bytes;
  SharedMemory memory =
      SharedMemory::create_sparse(size, config.ragged ? fixed : size);
  std::memcpy(memory.data(), &head, sizeof(head));
  return Slab(std::move(memory), sizes);
}

uint64_t Slab::slots_within(
    uint64_t budget_bytes,
    uint64_t num_samples,
    uint64_t slot_bytes) noexcept {
  if (num_samples == 0 || num_samples > kMostSlabSamples ||
      slot_bytes <= Slot::kOverheadBytes || slot_bytes > kMaxSlotBytes) {
    return 0;
  }
  Sizes sizes{num_samples, aligned(slot_bytes), 0, 0};
  const uint64_t fixed = std::min(sizes.slots_offset(), budget_bytes);
  sizes.arena_bytes = std::min(budget_bytes - fixed, kMaxArenaBytes);
  return sizes.num_slots();
}

Slab Slab::attach(const std::string& path, const std::string& run_id) {
  SharedMemory memory = SharedMemory::open(path);
  Superblock head{};
  if (memory.size() >= kSlabHeadBytes) {
    // Not next_byte: other processes take slots meanwhile.
    copy_words(&head, memory.data(), offsetof(Superblock, next_byte));
  }
  if (head.magic != kSlabMagic || head.format != kSlabFormat ||
      head.header_bytes != Slot::kOverheadBytes ||
      !head.sizes.fit(memory.size())) {
    refuse(
        "address",
        "a cache of format " + std::to_string(kSlabFormat),
        "memory of another format");
  }
  require_run_id(run_id, head.run_id);
  return Slab(std::move(memory), head.sizes);
}

Slab::Slab(SharedMemory memory, const Sizes& sizes)
    : memory_(std::move(memory)),
      sizes_(sizes),
      next_byte_(&reinterpret_cast<Superblock*>(memory_.data())->next_byte),
      num_clears_(&reinterpret_cast<Superblock*>(memory_.data())->num_clears),
      given_up_(&reinterpret_cast<Superblock*>(memory_.data())->given_up),
      index_(reinterpret_cast<uint64_t*>(memory_.data() + kSlabHeadBytes)),
      slots_(memory_.data() + sizes_.slots_offset()) {}

void Slab::prefetch(uint64_t sample) noexcept {
  const uint64_t entry = Word(index_[sample]).load(std::memory_order_relaxed);
  if (entry != 0 && (entry & kClaimed) == 0) {
    const std::optional<Extent> extent = extent_of(entry);
    if (extent && is_there(*extent)) {
      Slot(words_of(*extent)).prefetch(Slot::kOverheadBytes);
    }
  }
}

FindResult Slab::find(uint64_t sample, Found& found) noexcept {
  const uint64_t entry = Word(index_[sample]).load(std::memory_order_acquire);
  if (entry == 0 || (entry & kClaimed) != 0) {
    return FindResult::kAbsent;
  }
  const std::optional<Extent> extent = extent_of(entry);
  if (!extent) {
    return FindResult::kCorrupt;
  }
  if (!is_there(*extent)) {
    return FindResult::kAbsent;
  }
  found.slot = Slot(words_of(*extent));
  found.version = found.slot.version();
  if (found.version.state() != SlotState::kReady ||
      !found.slot.read_header(found.version, found.header)) {
    return FindResult::kAbsent;
  }
  const RecordHeader& header = found.header;
  if (header.checksum != header_checksum(header) || header.sample != sample ||
      header.payload_bytes > extent->bytes - Slot::kOverheadBytes ||
      !within_format(header.layout)) {
    found.slot.discard(found.version);
    return FindResult::kCorrupt;
  }
  return FindResult::kFound;
}

void Slab::drop(uint64_t sample) noexcept {
  Found found;
  if (find(sample, found) == FindResult::kFound) {
    found.slot.discard(found.version);
  }
}

void Slab::count_clear() noexcept {
  Word(*num_clears_).fetch_add(1, std::memory_order_acq_rel);
}

uint64_t Slab::num_clears() const noexcept {
  return Word(*num_clears_).load(std::memory_order_acquire);
}

void Slab::give_up() noexcept {
  Word(*given_up_).store(1, std::memory_order_release);
}

bool Slab::given_up() const noexcept {
  return Word(*given_up_).load(std::memory_order_acquire) != 0;
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
  const uint64_t record_bytes = Slot::kOverheadBytes + header.payload_bytes;
  if (record_bytes > (ragged() ? kMaxSlotBytes : slot_bytes())) {
    return WriteResult::kFull;
  }
  Found found;
  if (find(sample, found) == FindResult::kFound && found.header.key == key &&
      serves(found.header.layout, layout)) {
    return WriteResult::kSame;
  }
  const Assignment assignment = assign(sample, record_bytes);
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
Slab::Assignment Slab::assign(uint64_t sample, uint64_t record_bytes) noexcept {
  Word entry(index_[sample]);
  uint64_t seen = entry.load(std::memory_order_acquire);
  const bool claimed = (seen & kClaimed) != 0;
  if (seen != 0 && !claimed) {
    const std::optional<Extent> extent = extent_of(seen);
    if (!extent || !is_there(*extent)) {
      return {nullptr, WriteResult::kFull};
    }
    if (record_bytes <= extent->bytes) {
      return {words_of(*extent), WriteResult::kWritten};
    }
  }
  if (claimed && process_runs(static_cast<uint32_t>(seen))) {
    return {nullptr, WriteResult::kBusy};
  }
  const uint64_t bytes = aligned(ragged() ? record_bytes : slot_bytes());
  const uint64_t next = Word(*next_byte_).load(std::memory_order_relaxed);
  if (next > sizes_.arena_bytes || bytes > sizes_.arena_bytes - next) {
    return {nullptr, WriteResult::kFull};
  }
  const uint64_t before = claimed ? 0 : seen;  // a slot that is outgrown
  if (!entry.compare_exchange_strong(
          seen, kClaimed | current_process(), std::memory_order_acq_rel)) {
    return {nullptr, WriteResult::kBusy};
  }
  const std::optional<Extent> extent = take(bytes);
  if (!extent) {
    entry.store(before, std::memory_order_release);
    return {nullptr, WriteResult::kFull};
  }
  entry.store(
      bytes / kSlotAlignment << kBeginBits | extent->begin / kSlotAlignment,
      std::memory_order_release);
  return {words_of(*extent), WriteResult::kWritten};
}

// Takes bytes of the arena that nobody has; nothing: there are not as many.
std::optional<Slab::Extent> Slab::take(uint64_t bytes) noexcept {
  Word next_byte(*next_byte_);
  uint64_t begin = next_byte.load(std::memory_order_relaxed);
  do {
    if (begin > sizes_.arena_bytes || bytes > sizes_.arena_bytes - begin ||
        begin % kSlotAlignment != 0 ||
        (ragged() && !memory_.reserve(sizes_.slots_offset() + begin + bytes))) {
      return std::nullopt;
    }
  } while (!next_byte.compare_exchange_weak(
      begin, begin + bytes, std::memory_order_relaxed));
  return Extent{begin, bytes};
}

// What an index word says, if it can be: others may write anything.
std::optional<Slab::Extent> Slab::extent_of(uint64_t entry) const noexcept {
  const Extent extent{
      (entry & ((uint64_t{1} << kBeginBits) - 1)) * kSlotAlignment,
      (entry >> kBeginBits) * kSlotAlignment};
  if (extent.bytes < aligned(Slot::kOverheadBytes) ||
      extent.begin > sizes_.arena_bytes ||
      extent.bytes > sizes_.arena_bytes - extent.begin) {
    return std::nullopt;
  }
  if (!ragged() &&
      (extent.bytes != slot_bytes() || extent.begin % slot_bytes() != 0)) {
    return std::nullopt;
  }
  return extent;
}

// Whether a slot may be touched; else the memory for it cannot be had.
bool Slab::is_there(const Extent& extent) noexcept {
  return !ragged() ||
         memory_.reserve(sizes_.slots_offset() + extent.begin + extent.bytes);
}

uint64_t* Slab::words_of(const Extent& extent) const noexcept {
  return reinterpret_cast<uint64_t*>(slots_ + extent.begin);
}

uint64_t Slab::used_bytes() const noexcept {
  return std::min(
      Word(*next_byte_).load(std::memory_order_relaxed), sizes_.arena_bytes);
}

}  // namespace pipetransformer::autocache
