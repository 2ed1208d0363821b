#include "autocache/slot.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace pipetransformer::autocache {

// Note [Slot protocol]
// Word 0 is the version; the header and the payload follow. It is a seqlock:
//
//   writer                                 reader
//   w1 CAS version -> WRITING (acquire)    r1 load version (acquire), READY?
//   w2 release fence                       r2 relaxed loads of the words
//   w3 relaxed stores of the words         r3 acquire fence
//   w4 CAS version -> READY (release)      r4 load version (relaxed), same?
//
// * A reader that finds the READY of w4 at r1 sees all of that write's words
//   (release w4, acquire r1).
// * A reader that got at r2 a word of a later write saw a store after that
//   write's fence w2, so after its own fence r3 it sees at r4 the WRITING of
//   that write or something newer: the version differs, the copy is dropped.
//   Generations only grow, so an old version word never comes back (32 bits: a
//   reader would have to sleep through 2^32 writes of one slot).
// * Two writers: one CAS at w1 wins. Acquire at w1 orders the new words after
//   those of the earlier write, or of the dead writer that is taken over: that
//   one stores nothing any more, and its half-written words were never READY.
// * w4 expects the WRITING of this very write. A writer that was held dead and
//   is not (another pid namespace) thus loses the slot, and cannot make READY
//   what its successor is still writing. Words it stored late among those of
//   the successor are what the payload's checksum finds.
// * Every shared word is accessed atomically (relaxed costs the same as a plain
//   move), so there is no data race in the sense of the language, and a thread
//   sanitizer can check it. Words are lock-free, hence valid between processes.

namespace {

using Word = std::atomic_ref<uint64_t>;
static_assert(Word::is_always_lock_free);

constexpr std::size_t kHeaderWords = sizeof(RecordHeader) / sizeof(uint64_t);
constexpr std::size_t kPayloadWord = 1 + kHeaderWords;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__)
// One instruction, which the processor carries out by cache lines: half as fast
// again as a loop over words. To the compiler it is no access to memory at all,
// so there is nothing that it could take for a race; torn words are found as
// those of the loop are.
void copy_in_one(void* to, const void* from, std::size_t size) noexcept {
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
}
#define COPIES_IN_ONE 1
#endif

void load_bytes(std::byte* to, uint64_t* from, std::size_t size) noexcept {
#ifdef COPIES_IN_ONE
  return copy_in_one(to, from, size);
#endif
  const std::size_t whole = size / sizeof(uint64_t);
  for (std::size_t k = 0; k < whole; ++k) {
    const uint64_t word = Word(from[k]).load(std::memory_order_relaxed);
    std::memcpy(to + k * sizeof(word), &word, sizeof(word));
  }
  if (const std::size_t rest = size % sizeof(uint64_t); rest > 0) {
    const uint64_t word = Word(from[whole]).load(std::memory_order_relaxed);
    std::memcpy(to + whole * sizeof(word), &word, rest);
  }
}

void store_bytes(
    uint64_t* to,
    const std::byte* from,
    std::size_t size) noexcept {
#ifdef COPIES_IN_ONE
  return copy_in_one(to, from, size);
#endif
  const std::size_t whole = size / sizeof(uint64_t);
  for (std::size_t k = 0; k < whole; ++k) {
    uint64_t word = 0;
    std::memcpy(&word, from + k * sizeof(word), sizeof(word));
    Word(to[k]).store(word, std::memory_order_relaxed);
  }
  if (const std::size_t rest = size % sizeof(uint64_t); rest > 0) {
    uint64_t word = 0;
    std::memcpy(&word, from + whole * sizeof(word), rest);
    Word(to[whole]).store(word, std::memory_order_relaxed);
  }
}

bool unchanged(uint64_t* words, SlotVersion seen) noexcept {
  std::atomic_thread_fence(std::memory_order_acquire);
  return Word(words[0]).load(std::memory_order_relaxed) == seen.word();
}

}  // namespace

SlotVersion Slot::version() const noexcept {
  return SlotVersion(Word(words_[0]).load(std::memory_order_acquire));
}

bool Slot::read_header(SlotVersion seen, RecordHeader& header) const noexcept {
  load_bytes(
      reinterpret_cast<std::byte*>(&header), words_ + 1, sizeof(RecordHeader));
  return unchanged(words_, seen);
}

bool Slot::read_payload(SlotVersion seen, std::span<const Segment> segments)
    const noexcept {
  uint64_t* from = words_ + kPayloadWord;
  for (const Segment& segment : segments) {
    load_bytes(segment.data, from, segment.size);
    from += padded(segment.size) / sizeof(uint64_t);
  }
  return unchanged(words_, seen);
}

// The processor follows a stream by itself, but not over the end of a page and
// not before it has seen some lines of it.
void Slot::prefetch(std::size_t bytes) const noexcept {
  constexpr std::size_t kLine = 64;
  constexpr std::size_t kAhead = 1024;
  constexpr std::size_t kPage = 4096;
  const auto* from = reinterpret_cast<const std::byte*>(words_);
  for (std::size_t at = 0; at < std::min(bytes, kAhead); at += kLine) {
    __builtin_prefetch(from + at);
  }
  const std::size_t in_page = reinterpret_cast<std::uintptr_t>(from) % kPage;
  if (const std::size_t next = kPage - in_page; next < bytes) {
    for (std::size_t k = 0; k < 4; ++k) {
      __builtin_prefetch(from + next + k * kLine);
    }
  }
}

bool Slot::begin_write(SlotVersion seen, uint32_t writer) noexcept {
  uint64_t expected = seen.word();
  const SlotVersion writing(SlotState::kWriting, writer, seen.generation() + 1);
  if (!Word(words_[0]).compare_exchange_strong(
          expected,
          writing.word(),
          std::memory_order_acquire,
          std::memory_order_relaxed)) {
    return false;
  }
  std::atomic_thread_fence(std::memory_order_release);
  return true;
}

void Slot::write(
    const RecordHeader& header,
    std::span<const Segment> segments) noexcept {
  uint64_t* to = words_ + kPayloadWord;
  for (const Segment& segment : segments) {
    store_bytes(to, segment.data, segment.size);
    to += padded(segment.size) / sizeof(uint64_t);
  }
  store_bytes(
      words_ + 1,
      reinterpret_cast<const std::byte*>(&header),
      sizeof(RecordHeader));
}

bool Slot::publish(SlotVersion seen_at_begin, uint32_t writer) noexcept {
  const uint32_t generation = seen_at_begin.generation() + 1;
  uint64_t expected =
      SlotVersion(SlotState::kWriting, writer, generation).word();
  const SlotVersion ready(SlotState::kReady, 0, generation);
  return Word(words_[0]).compare_exchange_strong(
      expected,
      ready.word(),
      std::memory_order_release,
      std::memory_order_relaxed);
}

void Slot::discard(SlotVersion seen) noexcept {
  uint64_t expected = seen.word();
  const SlotVersion empty(SlotState::kEmpty, 0, seen.generation());
  Word(words_[0]).compare_exchange_strong(
      expected,
      empty.word(),
      std::memory_order_relaxed,
      std::memory_order_relaxed);
}

}  // namespace pipetransformer::autocache
