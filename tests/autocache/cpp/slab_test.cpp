// Tests of the slab without torch, so that a sanitizer can watch them: torn
// records under concurrent writers, and a writer that dies in the middle.
// Prints what failed and returns 1, or returns 0.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "autocache/process.h"
#include "autocache/slab.h"

namespace {

using namespace pipetransformer::autocache;

constexpr std::size_t kWords = 200;
using Payload = std::array<uint64_t, kWords>;
std::atomic<int> failures{0};

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    ++failures;
  }
}

std::array<Segment, 2> segments(Payload& payload) {
  auto* data = reinterpret_cast<std::byte*>(payload.data());
  // Two segments, the first of odd size.
  return {Segment{data, 803}, Segment{data + 808, sizeof(Payload) - 808}};
}

RecordLayout layout() {
  RecordLayout layout;
  layout.num_tensors = 2;
  return layout;
}

Payload filled(uint64_t value) {
  Payload payload;
  payload.fill(value);
  payload[100] &= 0xffffff;  // the padding of the first segment reads as zero
  return payload;
}

Slab make_slab(uint64_t num_samples, uint64_t num_slots, bool ragged = false) {
  const uint64_t slot_bytes =
      (Slot::kOverheadBytes + sizeof(Payload) + 63) & ~63;
  return Slab::create(
      {"test",
       num_samples,
       slot_bytes,
       4096 + ((num_samples * 8 + 63) & ~63) + num_slots * slot_bytes,
       ragged});
}

WriteResult write(Slab& slab, uint64_t sample, uint64_t value) {
  Payload payload = filled(value);
  RecordKey key;
  key.fingerprint = value;
  return slab.write(sample, key, layout(), segments(payload));
}

// Value of the record, 0 for none. Checks that it is whole.
uint64_t read(Slab& slab, uint64_t sample) {
  Slab::Found found;
  const FindResult result = slab.find(sample, found);
  check(result != FindResult::kCorrupt, "headers are whole");
  if (result != FindResult::kFound) {
    return 0;
  }
  Payload payload{};
  const ReadResult read = slab.read(found, segments(payload), true);
  check(read != ReadResult::kCorrupt, "payloads fit their checksum");
  if (read != ReadResult::kRead) {
    return 0;
  }
  const uint64_t value = found.header.key.fingerprint;
  check(payload == filled(value), "payloads belong to their header");
  return value;
}

// Two writers and two readers on few samples and fewer slots. The values of a
// writer grow (and are odd or even), so each reader sees them grow. All use one
// mapping, because a thread sanitizer goes by addresses.
void test_concurrent_use_tears_nothing(uint64_t rounds) {
  constexpr uint64_t kSamples = 6;
  Slab slab = make_slab(kSamples, 4);
  std::atomic<uint64_t> hits{0};
  std::atomic<bool> done{false};
  std::vector<std::thread> writers;
  std::vector<std::thread> readers;
  for (uint64_t who = 0; who < 2; ++who) {
    writers.emplace_back([&slab, who, rounds] {
      for (uint64_t round = 1; round <= rounds; ++round) {
        write(slab, round % kSamples, 2 * round + who);
      }
    });
    readers.emplace_back([&slab, &hits, &done] {
      std::array<std::array<uint64_t, 2>, kSamples> last{};
      while (!done) {
        for (uint64_t sample = 0; sample < kSamples; ++sample) {
          const uint64_t value = read(slab, sample);
          if (value != 0) {
            ++hits;
            uint64_t& before = last[sample][value % 2];
            check(value >= before, "an old record never comes back");
            before = value;
          }
        }
      }
    });
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
  done = true;
  for (std::thread& reader : readers) {
    reader.join();
  }
  uint64_t present = 0;
  for (uint64_t sample = 0; sample < kSamples; ++sample) {
    present += read(slab, sample) != 0 ? 1 : 0;
  }
  check(present == 4, "each slot has one sample, no slot was lost");
  check(hits > 0, "readers saw records");
}

// A child takes the slot, writes half of the record and is killed.
void test_writer_killed_midway_is_replaced() {
  Slab slab = make_slab(2, 2);
  check(write(slab, 1, 5) == WriteResult::kWritten, "first write");
  const pid_t child = ::fork();
  if (child == 0) {
    Slab::Found found;
    slab.find(1, found);
    found.slot.begin_write(found.version, current_process());
    Payload payload = filled(99);
    const auto parts = segments(payload);
    found.slot.write(RecordHeader{}, std::span(parts).first(1));
    ::raise(SIGKILL);
  }
  siginfo_t info{};
  ::waitid(P_PID, child, &info, WEXITED | WNOWAIT);  // dead, not yet reaped
  check(!process_runs(child), "a killed process does not run");
  check(read(slab, 1) == 0, "a half-written record is a miss");
  check(write(slab, 1, 6) == WriteResult::kWritten, "its slot is taken over");
  check(read(slab, 1) == 6, "the new record is there");
  ::waitpid(child, nullptr, 0);
  check(!process_runs(child), "a reaped process does not run");
}

void test_slot_in_use_is_left_alone() {
  Slab slab = make_slab(1, 1);
  write(slab, 0, 5);
  Slab::Found found;
  slab.find(0, found);
  check(found.slot.begin_write(found.version, current_process()), "begin");
  check(read(slab, 0) == 0, "a record being written is a miss");
  check(write(slab, 0, 6) == WriteResult::kBusy, "its writer runs");
  Payload payload{};
  const ReadResult late = slab.read(found, segments(payload), false);
  check(late == ReadResult::kChanged, "an earlier look-up notices");
}

// A process that has no descriptor left cannot look, and must not guess "dead".
void test_writer_that_cannot_be_looked_up_counts_as_running() {
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit none = before;
  none.rlim_cur = 0;
  ::setrlimit(RLIMIT_NOFILE, &none);
  const bool runs = process_runs(current_process());
  ::setrlimit(RLIMIT_NOFILE, &before);
  check(runs, "a process that cannot be looked up counts as running");
  check(!process_runs(0x3fffff), "a process that never was does not run");
}

// Two writers of one slot: the first was held dead by mistake.
void test_writer_that_lost_its_slot_publishes_nothing() {
  Slab slab = make_slab(1, 1);
  write(slab, 0, 5);
  Slab::Found found;
  slab.find(0, found);
  Slot slot = found.slot;
  check(slot.begin_write(found.version, 1), "the first begins");
  const SlotVersion taken = slot.version();
  check(slot.begin_write(taken, 2), "the second takes over");
  check(!slot.publish(found.version, 1), "the first has lost the slot");
  check(slot.version().state() == SlotState::kWriting, "nothing is READY yet");
  check(slot.publish(taken, 2), "the second publishes");
  check(!slot.publish(found.version, 1), "the first comes too late");
  check(slot.version().generation() == taken.generation() + 1, "the second's");
}

// A record of `words` words, all of the value.
WriteResult
write_words(Slab& slab, uint64_t sample, uint64_t value, std::size_t words) {
  std::vector<uint64_t> payload(words, value);
  const Segment segment{
      reinterpret_cast<std::byte*>(payload.data()), words * sizeof(uint64_t)};
  RecordKey key;
  key.fingerprint = value;
  return slab.write(sample, key, RecordLayout{}, std::span(&segment, 1));
}

// Value of a record of words, 0 for none. Checks that it is whole.
uint64_t read_words(Slab& slab, uint64_t sample) {
  Slab::Found found;
  const FindResult result = slab.find(sample, found);
  check(result != FindResult::kCorrupt, "ragged headers are whole");
  if (result != FindResult::kFound) {
    return 0;
  }
  std::vector<uint64_t> payload(found.header.payload_bytes / sizeof(uint64_t));
  const Segment segment{
      reinterpret_cast<std::byte*>(payload.data()),
      payload.size() * sizeof(uint64_t)};
  const ReadResult read = slab.read(found, std::span(&segment, 1), true);
  check(read != ReadResult::kCorrupt, "ragged payloads fit their checksum");
  const uint64_t value = found.header.key.fingerprint;
  for (const uint64_t word : payload) {
    check(
        read != ReadResult::kRead || word == value,
        "ragged payloads belong to their header");
  }
  return read == ReadResult::kRead ? value : 0;
}

void test_ragged_records_take_what_they_need() {
  Slab slab = make_slab(64, 12, true);
  const uint64_t room = 12 * slab.slot_bytes();
  uint64_t used = 0;
  for (uint64_t sample = 0; sample < 20; ++sample) {
    const std::size_t words = 1 + 7 * sample % 100;
    check(
        write_words(slab, sample, 100 + sample, words) == WriteResult::kWritten,
        "there is room");
    used += (Slot::kOverheadBytes + words * 8 + 63) / 64 * 64;
  }
  check(slab.used_bytes() == used && used <= room, "what was used is counted");
  for (uint64_t sample = 0; sample < 20; ++sample) {
    check(read_words(slab, sample) == 100 + sample, "all are there");
  }
  // One that outgrows its slot moves; one that fits again stays.
  check(write_words(slab, 0, 7, 100) == WriteResult::kWritten, "it moves");
  check(read_words(slab, 0) == 7, "the longer record is there");
  used = slab.used_bytes();
  check(write_words(slab, 0, 8, 90) == WriteResult::kWritten, "it stays");
  check(slab.used_bytes() == used, "its slot serves again");
  check(write_words(slab, 1, 9, 5000) == WriteResult::kFull, "too large");
  check(read_words(slab, 1) == 101, "what was there is left");
  uint64_t sample = 20;
  while (sample < 64 &&
         write_words(slab, sample, 5, 50) == WriteResult::kWritten) {
    ++sample;
  }
  check(sample < 64 && slab.used_bytes() <= room, "the room ends");
  check(read_words(slab, 19) == 119, "what came first stays");
}

// Records that grow, so that slots are given up while others read and write.
void test_growing_records_are_never_torn(uint64_t rounds) {
  constexpr uint64_t kSamples = 6;
  Slab slab = make_slab(kSamples, 6, true);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> hits{0};
  std::vector<std::thread> writers;
  std::vector<std::thread> readers;
  for (uint64_t who = 0; who < 2; ++who) {
    writers.emplace_back([&slab, who, rounds] {
      for (uint64_t round = 1; round <= rounds; ++round) {
        write_words(
            slab,
            round % kSamples,
            2 * round + who,
            1 + (round * 13 + who) % (20 + 80 * round / rounds));
      }
    });
    readers.emplace_back([&slab, &hits, &done] {
      while (!done) {
        for (uint64_t sample = 0; sample < kSamples; ++sample) {
          hits += read_words(slab, sample) != 0 ? 1 : 0;
        }
      }
    });
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
  done = true;
  for (std::thread& reader : readers) {
    reader.join();
  }
  for (uint64_t sample = 0; sample < kSamples; ++sample) {
    check(read_words(slab, sample) != 0, "each sample has a record");
  }
  check(hits > 0, "readers saw ragged records");
}

// Readers that drop what they read, and writers that die in the middle of a
// record: nothing is torn, and in the end each sample has a record again.
void test_dropped_and_abandoned_records_are_replaced(uint64_t rounds) {
  constexpr uint64_t kSamples = 6;
  constexpr uint32_t kDead = 0x3fffff;
  Slab slab = make_slab(kSamples, kSamples);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> dropped{0};
  std::atomic<uint64_t> abandoned{0};
  std::vector<std::thread> writers;
  std::vector<std::thread> readers;
  for (uint64_t who = 0; who < 2; ++who) {
    writers.emplace_back([&slab, &abandoned, who, rounds] {
      for (uint64_t round = 1; round <= rounds; ++round) {
        const uint64_t sample = round % kSamples;
        Slab::Found found;
        if (round % 7 != 0 || slab.find(sample, found) != FindResult::kFound ||
            !found.slot.begin_write(found.version, current_process())) {
          write(slab, sample, 2 * round + who);
          continue;
        }
        Payload payload = filled(~round);
        const auto parts = segments(payload);
        found.slot.write(RecordHeader{}, std::span(parts).first(1));
        // Its last words: the slot is that of a process that does not run.
        std::atomic_thread_fence(std::memory_order_release);
        check(
            found.slot.begin_write(found.slot.version(), kDead),
            "nobody takes a slot from a writer that runs");
        ++abandoned;
      }
    });
    readers.emplace_back([&slab, &done, &dropped] {
      while (!done) {
        for (uint64_t sample = 0; sample < kSamples; ++sample) {
          Slab::Found found;
          if (read(slab, sample) % 5 == 1 &&
              slab.find(sample, found) == FindResult::kFound) {
            found.slot.discard(found.version);
            ++dropped;
          }
        }
      }
    });
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
  done = true;
  for (std::thread& reader : readers) {
    reader.join();
  }
  check(dropped > 0 && abandoned > 0, "records were dropped and abandoned");
  for (uint64_t sample = 0; sample < kSamples; ++sample) {
    const uint64_t value = 2 * rounds + 2;
    check(write(slab, sample, value) == WriteResult::kWritten, "slots serve");
    check(read(slab, sample) == value, "each sample has a record again");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t rounds = argc > 1 ? std::stoul(argv[1]) : 1000;
  test_writer_killed_midway_is_replaced();
  test_slot_in_use_is_left_alone();
  test_writer_that_cannot_be_looked_up_counts_as_running();
  test_writer_that_lost_its_slot_publishes_nothing();
  test_concurrent_use_tears_nothing(rounds);
  test_dropped_and_abandoned_records_are_replaced(rounds);
  test_ragged_records_take_what_they_need();
  test_growing_records_are_never_torn(rounds);
  return failures == 0 ? 0 : 1;
}
