// Tests of the disk tier without torch, so that a sanitizer can watch them:
// records under concurrent writers, by io_uring and by threads, a writer that
// dies in the middle, and a child of a fork. Prints what failed and returns 1,
// or returns 0.
//
//   disk_test SEED ROUNDS
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "autocache/disk_index.h"
#include "autocache/disk_tier.h"
#include "autocache/process.h"

namespace {

using namespace pipetransformer::autocache;

constexpr std::size_t kWords = 700;
constexpr uint64_t kSamples = 8;
using Payload = std::array<uint64_t, kWords>;
std::atomic<int> failures{0};

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    ++failures;
  }
}

// Two segments, the first of odd size; the second's grows with the value, so
// that records outgrow their extents.
std::array<Segment, 2> segments(Payload& payload, uint64_t value) {
  auto* data = reinterpret_cast<std::byte*>(payload.data());
  return {Segment{data, 803}, Segment{data + 808, 8 * (1 + value % 590)}};
}

RecordLayout layout() {
  RecordLayout layout;
  layout.num_tensors = 2;
  return layout;
}

DiskIndex make_index(uint64_t blocks = 64) {
  const char* folder = std::getenv("TMPDIR");
  return DiskIndex::create(
      {"test",
       folder != nullptr ? folder : "/tmp",
       kSamples,
       blocks * DiskIndex::kBlockBytes,
       0});
}

DiskOptions options(DiskIoKind io) {
  DiskOptions options;
  options.io = io;
  options.patience = std::chrono::seconds(60);
  options.write_patience = std::chrono::seconds(60);
  return options;
}

WriteResult write(DiskTier& tier, uint64_t sample, uint64_t value) {
  Payload payload;
  payload.fill(value);
  RecordKey key;
  key.fingerprint = value;
  DiskTier::Writes writes(tier);
  const WriteResult result =
      writes.add(sample, key, layout(), segments(payload, value));
  const uint64_t stored = writes.finish();
  check(
      stored == (result == WriteResult::kWritten ? 1 : 0),
      "what is under way arrives");
  return result;
}

// Reads these samples together; returns their values, 0 for none.
std::vector<uint64_t>
read(DiskTier& tier, const std::vector<uint64_t>& samples) {
  std::vector<DiskTier::Request> requests;
  for (const uint64_t sample : samples) {
    DiskTier::Request request;
    request.sample = sample;
    if (tier.find(sample, request.found)) {
      requests.push_back(request);
    }
  }
  tier.fetch(requests);
  std::vector<uint64_t> values;
  for (const DiskTier::Request& each : requests) {
    check(each.outcome != DiskTier::Outcome::kCorrupt, "records are whole");
    check(each.outcome != DiskTier::Outcome::kLate, "reads are in time");
    if (each.outcome != DiskTier::Outcome::kRead) {
      values.push_back(0);
      continue;
    }
    const uint64_t value = each.record.header().key.fingerprint;
    check(value == each.found.key.fingerprint, "the key is that of the index");
    Payload payload{};
    const auto parts = segments(payload, value);
    check(
        tier.read(each.record, parts) == ReadResult::kRead,
        "payloads are whole");
    const std::size_t last = 101 + parts[1].size / 8 - 1;
    check(payload[0] == value, "a record begins with its own values");
    check(payload[last] == value, "and ends with them");
    values.push_back(value);
  }
  return values;
}

void concurrent_writers_tear_nothing(DiskIoKind io, unsigned seed, int rounds) {
  const DiskIndex first = make_index(16384);
  const std::string folder = "/proc/self/fd/";
  const auto attached = [&] {
    return DiskIndex::attach(
        folder + std::to_string(first.descriptor()),
        folder + std::to_string(first.file_descriptor()),
        "test");
  };
  DiskTier one(attached(), options(io));
  DiskTier other(attached(), options(io));
  std::atomic<uint64_t> next{1};
  std::vector<std::thread> threads;
  for (unsigned k = 0; k < 4; ++k) {
    threads.emplace_back([&, k] {
      std::mt19937 random(seed * 4 + k);
      DiskTier& tier = k % 2 == 0 ? one : other;
      for (int round = 0; round < rounds; ++round) {
        const uint64_t sample = random() % kSamples;
        if (k < 2) {
          write(tier, sample, next++);
          continue;
        }
        const auto ahead = static_cast<int64_t>((sample + 1) % kSamples);
        tier.prefetch({&ahead, 1});
        read(tier, {sample, (sample + 1) % kSamples});
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  check(
      read(other, {0, 1, 2, 3, 4, 5, 6, 7}).size() == kSamples,
      "all are there in the end");
  check(one.read_error() == 0 && other.read_error() == 0, "reading goes on");
  check(one.write_error() == 0 && other.write_error() == 0, "writing goes on");
}

void records_keep_their_places(DiskIoKind io) {
  DiskTier tier(make_index(4), options(io));
  // A block each for small records; what outgrows its own takes two more.
  check(write(tier, 0, 1) == WriteResult::kWritten, "a first record is stored");
  check(write(tier, 0, 1) == WriteResult::kSame, "its key is known");
  check(write(tier, 1, 2) == WriteResult::kWritten, "and a second");
  check(write(tier, 0, 3) == WriteResult::kWritten, "one is overwritten");
  check(tier.index().used_bytes() == 2 * 4096, "in its place");
  check(write(tier, 0, 589) == WriteResult::kWritten, "one grows");
  check(tier.index().used_bytes() == 4 * 4096, "into another place");
  check(write(tier, 2, 3) == WriteResult::kFull, "there is no more room");
  check(write(tier, 1, 588) == WriteResult::kFull, "for growth neither");
  check(
      read(tier, {0, 1, 2}) == std::vector<uint64_t>({589, 2}),
      "what has no room leaves the others alone");
  tier.clear();
  check(read(tier, {0, 1}).empty(), "clear() drops all");
  check(write(tier, 0, 4) == WriteResult::kWritten, "places stay");
}

void writer_that_dies_is_followed() {
  DiskIndex index = make_index();
  RecordKey key;
  const pid_t child = ::fork();
  if (child == 0) {
    DiskIndex::Claim claim;
    ::_exit(
        index.claim(3, key, 0, 100, claim) == WriteResult::kWritten ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  check(status == 0, "the child claims");
  DiskIndex::Found found;
  check(!index.find(3, found), "a claimed record is not found");
  DiskIndex::Claim claim;
  check(
      index.claim(3, key, 0, 100, claim) == WriteResult::kWritten,
      "the place of a dead writer is taken over");
  DiskIndex::Claim second;
  check(
      index.claim(3, key, 0, 100, second) == WriteResult::kBusy,
      "and then is taken");
  check(index.publish(claim), "and published");
  check(index.find(3, found), "and found");
  check(index.used_bytes() == 4096, "in the same place");
}

void child_of_a_fork_ends(DiskIoKind io) {
  auto tier = std::make_unique<DiskTier>(make_index(), options(io));
  write(*tier, 0, 7);
  const int64_t sample = 0;
  tier->prefetch({&sample, 1});
  const pid_t child = ::fork();
  if (child == 0) {
    DiskIndex::Found found;
    const bool none = !tier->find(0, found);
    tier->prefetch({&sample, 1});
    tier.reset();
    ::_exit(none ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  check(status == 0, "a child finds nothing, and ends");
  check(read(*tier, {0}) == std::vector<uint64_t>({7}), "the parent goes on");
}

}  // namespace

int main(int count, char** arguments) {
  const auto seed =
      static_cast<unsigned>(count > 1 ? std::atoi(arguments[1]) : 0);
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 1000;
  std::vector<DiskIoKind> kinds{DiskIoKind::kThreads};
  {
    DiskTier tier(make_index(), options(DiskIoKind::kUring));
    write(tier, 0, 1);
    const bool there = tier.write_error() == 0;
    std::printf("io_uring: %s\n", there ? "yes" : "no");
    if (there) {
      kinds.push_back(DiskIoKind::kUring);
    }
  }
  for (const DiskIoKind io : kinds) {
    records_keep_their_places(io);
    child_of_a_fork_ends(io);
    concurrent_writers_tear_nothing(io, seed, rounds);
  }
  writer_that_dies_is_followed();
  std::printf("%d rounds, %d failures\n", rounds, failures.load());
  return failures == 0 ? 0 : 1;
}
