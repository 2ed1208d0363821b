#include "autocache/disk_io.h"

// The build says when the header is there and the library is not.
#if __has_include(<liburing.h>) && !defined(PIPETRANSFORMER_WITHOUT_LIBURING)

#include <fcntl.h>
#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "autocache/own_file.h"

namespace pipetransformer::autocache {

namespace {

constexpr unsigned kDepth = 64;                     // jobs at once
constexpr uint64_t kMostBytes = uint64_t{1} << 30;  // of a piece
constexpr uint64_t kWake = 0;                       // no job's number

bool has_operations(io_uring& ring) {
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  if (probe == nullptr) {
    return false;
  }
  const bool both = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                    io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  io_uring_free_probe(probe);
  return both;
}

// The submission side of the ring is used under the mutex, the completion side
// by the one thread that waits there.
class UringIo : public DiskIo {
 public:
  static std::unique_ptr<DiskIo> make(int descriptor) {
    auto state = std::make_shared<State>(descriptor);
    if (state->file.get() < 0 || !state->begin()) {
      return nullptr;
    }
    try {
      return std::unique_ptr<DiskIo>(
          std::make_unique<UringIo>(std::move(state)));
    } catch (const std::system_error&) {
      return nullptr;  // no thread
    }
  }

  struct State;

  explicit UringIo(std::shared_ptr<State> state)
      : state_(std::move(state)),
        thread_([state = state_] { state->work(); }) {}

  void submit(std::span<const std::shared_ptr<DiskJob>> jobs) override {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->waiting.insert(state_->waiting.end(), jobs.begin(), jobs.end());
    state_->pump();
  }

  bool stop(std::chrono::milliseconds deadline) noexcept override {
    bool ended = false;
    {
      std::unique_lock<std::mutex> lock(state_->mutex);
      state_->stopping = true;
      state_->pump();
      ended = state_->signal.wait_for(
          lock, deadline, [this] { return state_->ended; });
    }
    ended ? thread_.join() : thread_.detach();
    return ended;
  }

  // Held by the thread, too, which may outlive the object: as long as the
  // kernel may write to a buffer, its job is among those that fly.
  struct State {
    explicit State(int descriptor)
        : file(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0)) {}
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    ~State() {
      if (ready) {
        io_uring_queue_exit(&ring);
      }
    }

    bool begin() {
      ready = io_uring_queue_init(kDepth, &ring, 0) == 0;
      return ready && has_operations(ring);
    }

    // Moves jobs to the ring; call it under the mutex.
    void pump() noexcept {
      if (stopping) {
        for (const std::shared_ptr<DiskJob>& job : waiting) {
          job->end(ECANCELED);
        }
        waiting.clear();
        if (io_uring_sqe* entry = woken ? nullptr : io_uring_get_sqe(&ring)) {
          io_uring_prep_nop(entry);
          entry->user_data = kWake;
          woken = true;
        }
      }
      while (!waiting.empty() && flying.size() < kDepth) {
        const std::shared_ptr<DiskJob>& job = waiting.front();
        if (!job->wanted()) {
          job->end(ECANCELED);
          waiting.pop_front();
          continue;
        }
        io_uring_sqe* entry = io_uring_get_sqe(&ring);
        if (entry == nullptr) {
          break;
        }
        prepare(*entry, *job);
        entry->user_data = next;
        flying.emplace(next++, job);
        waiting.pop_front();
      }
      if (io_uring_sq_ready(&ring) > 0) {
        // What the kernel does not take now goes with the next ones.
        io_uring_submit(&ring);
      }
    }

    void prepare(io_uring_sqe& entry, const DiskJob& job) const noexcept {
      std::byte* data = job.data.get() + job.moved;
      const auto left =
          static_cast<unsigned>(std::min(job.bytes - job.moved, kMostBytes));
      const uint64_t offset = job.offset + job.moved;
      if (job.kind == DiskJob::Kind::kRead) {
        io_uring_prep_read(&entry, file.get(), data, left, offset);
      } else {
        io_uring_prep_write(&entry, file.get(), data, left, offset);
      }
    }

    void work() noexcept {
      bool going = true;
      while (going) {
        io_uring_cqe* entry = nullptr;
        if (io_uring_wait_cqe(&ring, &entry) != 0) {
          continue;  // a signal
        }
        const uint64_t number = entry->user_data;
        const int64_t result = entry->res;
        io_uring_cqe_seen(&ring, entry);
        const std::lock_guard<std::mutex> lock(mutex);
        take(number, result);
        pump();
        going = !(stopping && flying.empty());
      }
      const std::lock_guard<std::mutex> lock(mutex);
      ended = true;
      signal.notify_all();
    }

    void take(uint64_t number, int64_t result) noexcept {
      const auto found = flying.find(number);
      if (found == flying.end()) {
        return;  // to wake up
      }
      const std::shared_ptr<DiskJob> job = std::move(found->second);
      flying.erase(found);
      if (!job->advance(result)) {
        waiting.push_front(job);
      }
    }

    const Descriptor file;
    io_uring ring{};
    bool ready = false;
    std::mutex mutex;  // guards the submission side, and what follows
    std::condition_variable signal;
    std::deque<std::shared_ptr<DiskJob>> waiting;
    std::unordered_map<uint64_t, std::shared_ptr<DiskJob>> flying;
    uint64_t next = kWake + 1;
    bool stopping = false;
    bool woken = false;
    bool ended = false;
  };

 private:
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<DiskIo> make_uring_io(int descriptor) {
  return UringIo::make(descriptor);
}

}  // namespace pipetransformer::autocache

#else

namespace pipetransformer::autocache {

std::unique_ptr<DiskIo> make_uring_io(int) {
  return nullptr;
}

}  // namespace pipetransformer::autocache

#endif
