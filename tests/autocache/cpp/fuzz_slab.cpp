// Feeds the readers of shared memory what others may have written there: memory
// with crafted superblocks, index words, slots and records with right
// checksums, before a slab attaches to it and while it is used.
//
//   fuzz_slab SEED ROUNDS
//
// Meant for the address sanitizer. That does not know the bounds of a mapping,
// so mmap and munmap are wrapped (-Wl,--wrap=mmap,--wrap=munmap): every mapping
// lies between pages that nobody may touch. Prints what failed and returns 1,
// or prints what was seen and returns 0.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "autocache/slab.h"
#include "core/hash.h"

namespace {

constexpr std::size_t kGuardBytes = std::size_t{1} << 30;
constexpr std::size_t kPageBytes = 4096;

std::size_t whole_pages(std::size_t size) {
  return (size + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace

// NOLINTBEGIN: the linker's names
extern "C" {

void* __real_mmap(void*, std::size_t, int, int, int, off_t);
int __real_munmap(void*, std::size_t);

void* __wrap_mmap(
    void*,
    std::size_t size,
    int protection,
    int flags,
    int file,
    off_t offset) {
  const std::size_t all = whole_pages(size) + 2 * kGuardBytes;
  constexpr int kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* base = __real_mmap(nullptr, all, PROT_NONE, kNothing, -1, 0);
  if (base == MAP_FAILED) {
    return base;
  }
  void* place = static_cast<char*>(base) + kGuardBytes;
  void* mapped =
      __real_mmap(place, size, protection, flags | MAP_FIXED, file, offset);
  if (mapped == MAP_FAILED) {
    __real_munmap(base, all);
  }
  return mapped;
}

int __wrap_munmap(void* data, std::size_t size) {
  return __real_munmap(
      static_cast<char*>(data) - kGuardBytes,
      whole_pages(size) + 2 * kGuardBytes);
}

}  // extern "C"
// NOLINTEND

namespace {

using namespace pipetransformer::autocache;
using pipetransformer::core::hash_bytes;

// The last slot ends with the mapping's last page.
constexpr uint64_t kSamples = 512;
constexpr uint64_t kSlots = 8;
constexpr uint64_t kSlotBytes = 512;
constexpr std::size_t kSizesAt = 16;  // samples, slot and arena bytes, ragged
constexpr std::size_t kNextByteAt = 320;
constexpr std::size_t kIndexAt = 4096;
constexpr std::size_t kSlotsAt = kIndexAt + kSamples * sizeof(uint64_t);
constexpr std::size_t kBytes = kSlotsAt + kSlots * kSlotBytes;
constexpr std::size_t kPayloadWords = 32;

// An index word.
constexpr uint64_t entry_of(uint64_t begin, uint64_t bytes) {
  return bytes / 64 << 37 | begin / 64;
}

struct Counts {
  uint64_t attached = 0;
  uint64_t refused = 0;
  uint64_t found = 0;
  uint64_t read = 0;
  uint64_t written = 0;
  int failures = 0;

  void check(bool holds, const char* what) {
    if (!holds) {
      std::printf("failed: %s\n", what);
      ++failures;
    }
  }
};

// The bytes of somebody's slab: a descriptor, and a mapping to write through.
class Memory {
 public:
  explicit Memory(const std::vector<std::byte>& content)
      : size_(content.size()),
        file_(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (file_ < 0 || ::fchmod(file_, 0600) != 0 ||
        ::ftruncate(file_, static_cast<off_t>(size_)) != 0 ||
        ::pwrite(file_, content.data(), size_, 0) !=
            static_cast<ssize_t>(size_) ||
        ::fcntl(file_, F_ADD_SEALS, kSeals) != 0) {
      throw std::system_error(errno, std::generic_category(), "memfd");
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    ::close(file_);
  }

  std::string path() const {
    return "/proc/self/fd/" + std::to_string(file_);
  }
  std::size_t size() const {
    return size_;
  }
  void write(std::size_t at, const void* bytes, std::size_t size) const {
    if (::pwrite(file_, bytes, size, static_cast<off_t>(at)) < 0) {
      throw std::system_error(errno, std::generic_category(), "pwrite");
    }
  }

 private:
  std::size_t size_;
  int file_;
};

class Fuzz {
 public:
  explicit Fuzz(uint64_t seed) : random_(seed) {}

  uint64_t below(uint64_t limit) {
    return random_() % limit;
  }

  // Numbers at which arithmetic goes wrong, small ones, and any.
  uint64_t number() {
    const uint64_t power = uint64_t{1} << below(64);
    switch (below(6)) {
      case 0:
        return power;
      case 1:
        return power - 1;
      case 2:
        return ~uint64_t{0} - below(128);
      case 3:
        return below(1024);
      case 4:
        return power + 64 * below(64);
      default:
        return random_();
    }
  }

  // Sizes of which the sum comes out as `bytes` when it leaves 64 bits.
  std::array<uint64_t, 4> wrapping_sizes(uint64_t bytes) {
    const uint64_t samples = number();
    const uint64_t index = (samples * sizeof(uint64_t) + 63) / 64 * 64;
    return {samples, number(), bytes - kIndexAt - index, below(3)};
  }

  // A header with a right checksum over values that may be anything.
  RecordHeader header() {
    RecordHeader header;
    header.sample = below(8) == 0 ? number() : below(kSamples);
    header.key.fingerprint = 1;
    header.payload_bytes = below(2) == 0 ? number() : 8 * below(64);
    header.layout.num_tensors = static_cast<uint32_t>(
        below(3) == 0 ? number() : below(kMaxTensors + 2));
    for (TensorLayout& tensor : header.layout.tensors) {
      tensor.dtype = static_cast<uint8_t>(below(2) == 0 ? number() : below(50));
      tensor.codec = static_cast<Codec>(below(8) == 0 ? number() : below(5));
      tensor.num_dims =
          static_cast<uint8_t>(below(3) == 0 ? number() : below(kMaxDims + 2));
      tensor.ragged = static_cast<uint8_t>(below(8) == 0 ? number() : below(2));
      for (uint32_t& size : tensor.sizes) {
        size = static_cast<uint32_t>(below(3) == 0 ? number() : below(20));
      }
    }
    header.checksum = hash_bytes(&header, offsetof(RecordHeader, checksum));
    return header;
  }

  // Writes once, somewhere that matters.
  void disturb(const Memory& memory) {
    const uint64_t word = number();
    switch (below(6)) {
      case 0: {
        const auto sizes = wrapping_sizes(memory.size());
        memory.write(kSizesAt, sizes.data(), sizeof(sizes));
        break;
      }
      case 1:
        memory.write(8 * below(kNextByteAt / 8 + 1), &word, sizeof(word));
        break;
      case 2: {
        const uint64_t entry =
            below(2) == 0
                ? word
                : entry_of(
                      64 * below(kSlots * kSlotBytes / 64 + 3), 64 * below(24));
        memory.write(kIndexAt + 8 * below(kSamples), &entry, sizeof(entry));
        break;
      }
      case 3: {
        const std::size_t slot = kSlotsAt + below(kSlots) * kSlotBytes;
        const RecordHeader made = header();
        const SlotVersion ready(
            SlotState::kReady, 0, static_cast<uint32_t>(word));
        const uint64_t version = ready.word();
        memory.write(slot, &version, sizeof(version));
        memory.write(slot + sizeof(version), &made, sizeof(made));
        const uint64_t entry = entry_of(slot - kSlotsAt, kSlotBytes);
        const uint64_t sample = made.sample % kSamples;
        memory.write(kIndexAt + 8 * sample, &entry, sizeof(entry));
        break;
      }
      case 4:
        memory.write(
            kSlotsAt + 8 * below(kSlots * kSlotBytes / 8), &word, sizeof(word));
        break;
      default:
        memory.write(below(memory.size() - 8), &word, sizeof(word));
    }
  }

 private:
  std::mt19937_64 random_;
};

// A slab of this run with some records in it.
std::vector<std::byte> template_bytes(bool ragged) {
  Slab slab = Slab::create({"fuzz", kSamples, kSlotBytes, kBytes, ragged});
  for (uint64_t sample = 0; sample < kSlots / 2; ++sample) {
    std::array<uint64_t, kPayloadWords> payload;
    payload.fill(sample);
    const Segment segment{
        reinterpret_cast<std::byte*>(payload.data()), sizeof(payload)};
    RecordKey key;
    key.fingerprint = 1;
    slab.write(sample, key, RecordLayout{}, std::span(&segment, 1));
  }
  std::vector<std::byte> bytes(kBytes);
  if (::pread(slab.descriptor(), bytes.data(), bytes.size(), 0) !=
      static_cast<ssize_t>(bytes.size())) {
    throw std::system_error(errno, std::generic_category(), "pread");
  }
  return bytes;
}

// Reads and writes as the store of activations does, in memory of its own.
void use(Slab& slab, Fuzz& fuzz, Counts& counts) {
  // All of the slots may be named anywhere in the index.
  for (uint64_t sample = 0; sample < slab.num_samples(); ++sample) {
    Slab::Found found;
    if (slab.find(sample, found) != FindResult::kFound) {
      continue;
    }
    ++counts.found;
    const RecordHeader& header = found.header;
    counts.check(
        Slot::kOverheadBytes + header.payload_bytes <=
            (slab.ragged() ? kSlots * kSlotBytes : slab.slot_bytes()),
        "a payload is within its slot");
    counts.check(
        header.layout.num_tensors <= kMaxTensors,
        "a layout ends with its array");
    for (const TensorLayout& tensor : header.layout.tensors) {
      counts.check(tensor.num_dims <= kMaxDims, "sizes end with their array");
    }
    std::vector<std::byte> payload(header.payload_bytes);
    const Segment segment{payload.data(), payload.size()};
    const ReadResult result =
        slab.read(found, std::span(&segment, 1), fuzz.below(2) == 0);
    counts.read += result == ReadResult::kRead ? 1 : 0;
  }
  for (int round = 0; round < 4; ++round) {
    std::vector<std::byte> payload(fuzz.below(2 * kSlotBytes));
    const Segment segment{payload.data(), payload.size()};
    RecordKey key;
    key.fingerprint = 2 + fuzz.below(3);
    const WriteResult result = slab.write(
        fuzz.below(slab.num_samples()),
        key,
        RecordLayout{},
        std::span(&segment, 1));
    counts.written += result == WriteResult::kWritten ? 1 : 0;
  }
}

std::optional<Slab> attached(const Memory& memory, Counts& counts) {
  try {
    Slab slab = Slab::attach(memory.path(), "fuzz");
    ++counts.attached;
    counts.check(
        slab.num_samples() <= (memory.size() - kIndexAt) / 8 &&
            slab.num_slots() <= slab.num_samples() &&
            slab.num_slots() * slab.slot_bytes() < memory.size(),
        "what is attached to fits its memory");
    return slab;
  } catch (const std::invalid_argument&) {
    ++counts.refused;
  } catch (const std::system_error& error) {
    std::printf("failed: %s\n", error.what());
    ++counts.failures;
  }
  return std::nullopt;
}

// Whatever is there when it attaches, and after.
void fuzz_attach(
    const std::vector<std::byte>& bytes,
    Fuzz& fuzz,
    Counts& counts) {
  std::vector<std::byte> content = bytes;
  if (fuzz.below(8) == 0) {
    content.resize(1 + fuzz.below(2 * kBytes));
  }
  const Memory memory(content);
  if (memory.size() >= kBytes) {
    for (uint64_t n = fuzz.below(4); n > 0; --n) {
      fuzz.disturb(memory);
    }
  }
  if (std::optional<Slab> slab = attached(memory, counts)) {
    for (uint64_t n = fuzz.below(12); n > 0; --n) {
      fuzz.disturb(memory);
    }
    use(*slab, fuzz, counts);
    use(*slab, fuzz, counts);
  }
}

// Another process writes all the while.
void fuzz_beside_a_writer(
    const std::vector<std::byte>& bytes,
    Fuzz& fuzz,
    Counts& counts,
    uint64_t rounds) {
  const Memory memory(bytes);
  std::optional<Slab> slab = attached(memory, counts);
  counts.check(slab.has_value(), "an undisturbed slab is attached to");
  const pid_t writer = ::fork();
  if (writer == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
      fuzz.disturb(memory);
    }
  }
  for (uint64_t round = 0; round < rounds && slab; ++round) {
    use(*slab, fuzz, counts);
  }
  ::kill(writer, SIGKILL);
  ::waitpid(writer, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::printf("usage: fuzz_slab SEED ROUNDS\n");
    return 2;
  }
  const uint64_t rounds = std::stoull(argv[2]);
  Fuzz fuzz(std::stoull(argv[1]));
  Counts counts;
  for (const bool ragged : {false, true}) {
    const std::vector<std::byte> bytes = template_bytes(ragged);
    for (uint64_t round = ragged ? 1 : 0; round < rounds; round += 2) {
      fuzz_attach(bytes, fuzz, counts);
    }
    fuzz_beside_a_writer(bytes, fuzz, counts, rounds / 20);
  }
  // Else the fuzzing shows nothing.
  counts.check(counts.refused > rounds / 20, "some memory is refused");
  counts.check(counts.attached > rounds / 20, "some memory is attached to");
  counts.check(counts.read > rounds / 20, "some records are read");
  counts.check(counts.written > rounds / 20, "some records are written");
  std::printf(
      "%llu rounds, %llu attached, %llu refused, %llu found, %llu read, "
      "%llu written, %d failures\n",
      static_cast<unsigned long long>(rounds),
      static_cast<unsigned long long>(counts.attached),
      static_cast<unsigned long long>(counts.refused),
      static_cast<unsigned long long>(counts.found),
      static_cast<unsigned long long>(counts.read),
      static_cast<unsigned long long>(counts.written),
      counts.failures);
  return counts.failures == 0 ? 0 : 1;
}
