#include "autocache/disk_index.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "autocache/process.h"
#include "autocache/superblock.h"

namespace pipetransformer::autocache {

namespace {

using Word = std::atomic_ref<uint64_t>;

constexpr uint64_t kIndexMagic = 0x6b73696465686361;  // "achedisk"
constexpr uint32_t kIndexFormat = 1;
constexpr uint64_t kIndexHeadBytes = 4096;
constexpr uint64_t kMostIndexSamples = uint64_t{1} << 53;  // sums stay in range
constexpr uint64_t kMaxBlocks = uint64_t{1} << 40;         // of a file: 4 PiB
constexpr uint64_t kMaxRecordBlocks = uint64_t{1} << 18;   // 1 GiB

// Words of a sample. kSize: capacity of its extent and what the record uses of
// it, 32 bits each, in blocks.
enum Field { kVersion, kBegin, kSize, kEncodings, kKey };
constexpr std::size_t kKeyWords = sizeof(RecordKey) / sizeof(uint64_t);
constexpr std::size_t kEntryWords = kKey + kKeyWords;

constexpr uint64_t blocks_of(uint64_t bytes) {
  return bytes / DiskIndex::kBlockBytes +
         (bytes % DiskIndex::kBlockBytes != 0 ? 1 : 0);
}

uint64_t load(const uint64_t* words, std::size_t field) noexcept {
  return Word(const_cast<uint64_t*>(words)[field])
      .load(std::memory_order_relaxed);
}

void store(uint64_t* words, std::size_t field, uint64_t value) noexcept {
  Word(words[field]).store(value, std::memory_order_relaxed);
}

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// A file in `directory` that has no name, for this user alone.
Descriptor open_unnamed(const std::string& directory) {
  Descriptor file(::open(
      directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (file.get() >= 0) {
    return file;
  }
  std::string name = directory + "/.pipetransformer-cache-XXXXXX";
  Descriptor named(::mkostemp(name.data(), O_CLOEXEC));
  if (named.get() < 0) {
    fail("make a file in " + directory);
  }
  if (::unlink(name.c_str()) != 0) {
    fail("unlink " + name);
  }
  return named;
}

// Whether reads and writes of blocks past the page cache work there.
bool go_direct(int file) {
  const int flags = ::fcntl(file, F_GETFL);
  if (flags < 0 || ::fcntl(file, F_SETFL, flags | O_DIRECT) != 0) {
    return false;
  }
  alignas(DiskIndex::kBlockBytes) std::array<std::byte, DiskIndex::kBlockBytes>
      block{};
  const auto size = static_cast<ssize_t>(block.size());
  if (::pwrite(file, block.data(), block.size(), 0) == size &&
      ::pread(file, block.data(), block.size(), 0) == size) {
    return true;
  }
  ::fcntl(file, F_SETFL, flags);
  return false;
}

void reserve(int file, uint64_t bytes) {
  // Not posix_fallocate, which writes to every block where it has no other way.
  int result = -1;
  do {
    result = ::fallocate(file, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) {
    result = ::ftruncate(file, static_cast<off_t>(bytes));
  }
  if (result != 0) {
    fail("reserve " + std::to_string(bytes) + " bytes on disk");
  }
}

}  // namespace

// Whether create() makes such sizes, and the index is as long as they need.
bool DiskIndex::Sizes::fit(uint64_t memory_bytes) const noexcept {
  return num_samples > 0 && num_samples <= kMostIndexSamples / kEntryWords &&
         num_blocks > 0 && num_blocks <= kMaxBlocks && least_blocks > 0 &&
         least_blocks <= kMaxRecordBlocks && least_blocks <= num_blocks &&
         direct <= 1 && memory_bytes == index_bytes(num_samples);
}

// Written before anybody else can know the index, and read when one attaches;
// `next_block` is in use from then on.
struct DiskIndex::Superblock {
  uint64_t magic;
  uint32_t format;
  uint32_t header_bytes;
  Sizes sizes;
  char run_id[kMaxRunIdBytes];
  alignas(64) uint64_t next_block;
};

uint64_t DiskIndex::index_bytes(uint64_t num_samples) noexcept {
  return kIndexHeadBytes + num_samples * kEntryWords * sizeof(uint64_t);
}

DiskIndex DiskIndex::create(const DiskConfig& config) {
  static_assert(sizeof(Superblock) <= kIndexHeadBytes);
  Superblock head{};
  put_run_id(config.run_id, head.run_id);
  head.magic = kIndexMagic;
  head.format = kIndexFormat;
  head.header_bytes = sizeof(RecordHeader);
  Sizes& sizes = head.sizes;
  sizes.num_samples = config.num_samples;
  sizes.num_blocks = std::min(config.bytes / kBlockBytes, kMaxBlocks);
  sizes.least_blocks = std::max<uint64_t>(1, blocks_of(config.least_bytes));
  if (!sizes.fit(index_bytes(config.num_samples))) {
    refuse(
        "disk_bytes",
        "at least " + std::to_string(sizes.least_blocks * kBlockBytes) +
            " for one record of at most " +
            std::to_string(kMaxRecordBlocks * kBlockBytes) +
            ", and at least one sample",
        std::to_string(config.bytes));
  }
  SharedMemory memory = SharedMemory::create(index_bytes(sizes.num_samples));
  Descriptor file = open_unnamed(config.directory);
  struct stat info {};
  if (::fchmod(file.get(), S_IRUSR | S_IWUSR) != 0 ||
      ::fstat(file.get(), &info) != 0) {
    fail("make a file in " + config.directory);
  }
  reserve(file.get(), sizes.num_blocks * kBlockBytes);
  sizes.direct = go_direct(file.get()) ? 1 : 0;
  sizes.device = info.st_dev;
  sizes.inode = info.st_ino;
  std::memcpy(memory.data(), &head, sizeof(head));
  return DiskIndex(std::move(memory), std::move(file), sizes);
}

DiskIndex DiskIndex::attach(
    const std::string& index_path,
    const std::string& file_path,
    const std::string& run_id) {
  SharedMemory memory = SharedMemory::open(index_path);
  Superblock head{};
  if (memory.size() >= kIndexHeadBytes) {
    // Not next_block: other processes take extents meanwhile.
    copy_words(&head, memory.data(), offsetof(Superblock, next_block));
  }
  if (head.magic != kIndexMagic || head.format != kIndexFormat ||
      head.header_bytes != sizeof(RecordHeader) ||
      !head.sizes.fit(memory.size())) {
    refuse(
        "address",
        "an index of records on disk of format " + std::to_string(kIndexFormat),
        "memory of another format");
  }
  require_run_id(run_id, head.run_id);
  const OwnFile place(file_path, "a cache's file of this user on disk");
  const struct stat& info = place.info();
  if (info.st_dev != head.sizes.device || info.st_ino != head.sizes.inode) {
    place.refuse("a file that is not the one of the index");
  }
  if (static_cast<uint64_t>(info.st_size) !=
      head.sizes.num_blocks * kBlockBytes) {
    place.refuse("a file of " + std::to_string(info.st_size) + " bytes");
  }
  Descriptor file = place.open(O_RDWR);
  // Nor non-blocking: io_uring would give up where it has to wait.
  const int flags = head.sizes.direct != 0 ? O_DIRECT : 0;
  if (::fcntl(file.get(), F_SETFL, flags) != 0) {
    fail("open " + file_path);
  }
  return DiskIndex(std::move(memory), std::move(file), head.sizes);
}

DiskIndex::DiskIndex(SharedMemory memory, Descriptor file, const Sizes& sizes)
    : memory_(std::move(memory)),
      file_(std::move(file)),
      sizes_(sizes),
      next_block_(&reinterpret_cast<Superblock*>(memory_.data())->next_block),
      index_(reinterpret_cast<uint64_t*>(memory_.data() + kIndexHeadBytes)) {}

uint64_t* DiskIndex::words_of(uint64_t sample) const noexcept {
  return index_ + sample * kEntryWords;
}

// What the words of a sample say, if it can be: others may write anything.
std::optional<DiskIndex::Extent>
DiskIndex::extent_of(const uint64_t* words) const noexcept {
  const uint64_t size = load(words, kSize);
  const Extent extent{
      load(words, kBegin), size >> 32, size & ((uint64_t{1} << 32) - 1)};
  if (extent.used == 0 || extent.used > extent.capacity ||
      extent.used > kMaxRecordBlocks || extent.begin > sizes_.num_blocks ||
      extent.capacity > sizes_.num_blocks - extent.begin) {
    return std::nullopt;
  }
  return extent;
}

bool DiskIndex::find(uint64_t sample, Found& found) noexcept {
  const uint64_t* words = words_of(sample);
  found.version = Slot(words_of(sample)).version();
  if (found.version.state() != SlotState::kReady) {
    return false;
  }
  const std::optional<Extent> extent = extent_of(words);
  const uint64_t encodings = load(words, kEncodings);
  std::array<uint64_t, kKeyWords> key;
  for (std::size_t k = 0; k < kKeyWords; ++k) {
    key[k] = load(words, kKey + k);
  }
  if (!extent || !unchanged(sample, found.version)) {
    return false;
  }
  found.key = std::bit_cast<RecordKey>(key);
  found.encodings = encodings;
  found.begin = extent->begin * kBlockBytes;
  found.bytes = extent->used * kBlockBytes;
  return true;
}

bool DiskIndex::unchanged(uint64_t sample, SlotVersion version) noexcept {
  std::atomic_thread_fence(std::memory_order_acquire);
  return load(words_of(sample), kVersion) == version.word();
}

void DiskIndex::discard(uint64_t sample, SlotVersion version) noexcept {
  Slot(words_of(sample)).discard(version);
}

WriteResult DiskIndex::claim(
    uint64_t sample,
    const RecordKey& key,
    uint64_t encodings,
    uint64_t bytes,
    Claim& claim) noexcept {
  const uint64_t used = blocks_of(bytes);
  if (used > kMaxRecordBlocks) {
    return WriteResult::kFull;
  }
  Found found;
  if (find(sample, found) && found.key == key &&
      (found.encodings == encodings || found.encodings == 0)) {
    return WriteResult::kSame;
  }
  uint64_t* words = words_of(sample);
  Slot slot(words);
  const std::optional<Extent> before = extent_of(words);
  const uint64_t capacity = std::max(used, sizes_.least_blocks);
  const uint64_t next = Word(*next_block_).load(std::memory_order_relaxed);
  if ((!before || before->capacity < used) &&
      (next > sizes_.num_blocks || capacity > sizes_.num_blocks - next)) {
    return WriteResult::kFull;
  }
  const SlotVersion seen = slot.version();
  const bool writing = seen.state() == SlotState::kWriting;
  const uint32_t self = current_process();
  if ((writing && process_runs(seen.writer())) ||
      !slot.begin_write(seen, self)) {
    return WriteResult::kBusy;
  }
  claim.sample = sample;
  claim.seen = seen;
  claim.writer = self;
  // Asked again: nobody else changes it from here on.
  std::optional<Extent> extent = extent_of(words);
  if (!extent || extent->capacity < used) {
    const std::optional<uint64_t> begin = take(capacity);
    if (!begin) {
      abandon(claim);
      return WriteResult::kFull;
    }
    extent = Extent{*begin, capacity, used};
  }
  // In this order: a process that dies in between leaves the old capacity at
  // the new place, where there is more.
  store(words, kBegin, extent->begin);
  Word(words[kSize])
      .store(extent->capacity << 32 | used, std::memory_order_release);
  store(words, kEncodings, encodings);
  const auto key_words = std::bit_cast<std::array<uint64_t, kKeyWords>>(key);
  for (std::size_t k = 0; k < kKeyWords; ++k) {
    store(words, kKey + k, key_words[k]);
  }
  claim.begin = extent->begin * kBlockBytes;
  return WriteResult::kWritten;
}

bool DiskIndex::publish(const Claim& claim) noexcept {
  return Slot(words_of(claim.sample)).publish(claim.seen, claim.writer);
}

void DiskIndex::abandon(const Claim& claim) noexcept {
  discard(
      claim.sample,
      SlotVersion(
          SlotState::kWriting, claim.writer, claim.seen.generation() + 1));
}

// Takes blocks of the file that nobody has; nothing: there are not as many.
std::optional<uint64_t> DiskIndex::take(uint64_t blocks) noexcept {
  Word next_block(*next_block_);
  uint64_t begin = next_block.load(std::memory_order_relaxed);
  do {
    if (begin > sizes_.num_blocks || blocks > sizes_.num_blocks - begin) {
      return std::nullopt;
    }
  } while (!next_block.compare_exchange_weak(
      begin, begin + blocks, std::memory_order_relaxed));
  return begin;
}

uint64_t DiskIndex::used_bytes() const noexcept {
  return kBlockBytes * std::min(
                           Word(*next_block_).load(std::memory_order_relaxed),
                           sizes_.num_blocks);
}

}  // namespace pipetransformer::autocache
