// Random reads of a file past the page cache: how fast its disk gives records.
//
//   direct_reads FILE RECORD_BYTES NUM_RECORDS NUM_READS SEED
//
// Reads whole records of RECORD_BYTES, a multiple of 4096, at random multiples
// of that, by io_uring with 64 at once (built with WITH_LIBURING) or by eight
// threads. Prints the seconds that NUM_READS of them took.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#ifdef WITH_LIBURING
#include <liburing.h>
#endif

namespace {

constexpr std::size_t kAlignment = 4096;

struct Work {
  int file;
  std::size_t bytes;
  std::vector<off_t> places;
};

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

void* buffer(std::size_t bytes) {
  void* data = std::aligned_alloc(kAlignment, bytes);
  if (data == nullptr) {
    fail("memory");
  }
  return data;
}

#ifdef WITH_LIBURING
void read_all(const Work& work) {
  constexpr unsigned kDepth = 64;
  io_uring ring;
  if (io_uring_queue_init(kDepth, &ring, 0) != 0) {
    fail("io_uring");
  }
  std::size_t next = 0;
  std::size_t ended = 0;
  std::vector<void*> idle;
  for (unsigned k = 0; k < kDepth; ++k) {
    idle.push_back(buffer(work.bytes));
  }
  while (ended < work.places.size()) {
    while (!idle.empty() && next < work.places.size()) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring);
      io_uring_prep_read(
          entry,
          work.file,
          idle.back(),
          static_cast<unsigned>(work.bytes),
          work.places[next++]);
      io_uring_sqe_set_data(entry, idle.back());
      idle.pop_back();
    }
    io_uring_submit_and_wait(&ring, 1);
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring, &entry) == 0) {
      if (entry->res != static_cast<int>(work.bytes)) {
        fail("read");
      }
      idle.push_back(io_uring_cqe_get_data(entry));
      io_uring_cqe_seen(&ring, entry);
      ++ended;
    }
  }
  io_uring_queue_exit(&ring);
}
#else
void read_all(const Work& work) {
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> threads;
  for (int k = 0; k < 8; ++k) {
    threads.emplace_back([&] {
      void* data = buffer(work.bytes);
      for (std::size_t at = next++; at < work.places.size(); at = next++) {
        if (::pread(work.file, data, work.bytes, work.places[at]) !=
            static_cast<ssize_t>(work.bytes)) {
          fail("read");
        }
      }
      std::free(data);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}
#endif

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) {
    std::fprintf(stderr, "usage: direct_reads FILE BYTES RECORDS READS SEED\n");
    return 2;
  }
  Work work;
  work.file = ::open(arguments[1], O_RDONLY | O_DIRECT);
  if (work.file < 0) {
    fail("open");
  }
  work.bytes = std::strtoull(arguments[2], nullptr, 10);
  const auto records = std::strtoull(arguments[3], nullptr, 10);
  const auto reads = std::strtoull(arguments[4], nullptr, 10);
  std::mt19937_64 random(std::strtoull(arguments[5], nullptr, 10));
  for (unsigned long long k = 0; k < reads; ++k) {
    work.places.push_back(static_cast<off_t>(random() % records * work.bytes));
  }
  const auto begin = std::chrono::steady_clock::now();
  read_all(work);
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begin;
  std::printf("%.9f\n", took.count());
  return 0;
}
