#include "autocache/disk_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "autocache/own_file.h"

namespace pipetransformer::autocache {

bool DiskJob::wait(Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_signal_.wait_until(lock, deadline, [this] { return ended_; });
}

void DiskJob::count(std::shared_ptr<DiskMeter> meter) noexcept {
  meter_ = std::move(meter);
  meter_->begin();
}

void DiskJob::end(int error) noexcept {
  if (meter_ != nullptr) {
    meter_->end(error == 0 ? bytes : 0);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = error;
  ended_ = true;
  ended_signal_.notify_all();
}

bool DiskJob::advance(int64_t result) noexcept {
  if (result == -EINTR || result == -EAGAIN) {
    return false;
  }
  if (result <= 0) {
    end(result < 0 ? static_cast<int>(-result) : EIO);  // the file is shorter
    return true;
  }
  moved += static_cast<uint64_t>(result);
  if (moved < bytes) {
    return false;
  }
  end(0);
  return true;
}

namespace {

class ThreadIo : public DiskIo {
 public:
  ThreadIo(int descriptor, int num_threads)
      : state_(std::make_shared<State>(descriptor)) {
    for (int k = 0; k < num_threads; ++k) {
      try {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        threads_.emplace_back([state = state_] { state->work(); });
        ++state_->running;
      } catch (const std::system_error&) {
        if (threads_.empty()) {
          throw;
        }
        break;  // fewer do as well
      }
    }
  }

  void submit(std::span<const std::shared_ptr<DiskJob>> jobs) override {
    {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      state_->queue.insert(state_->queue.end(), jobs.begin(), jobs.end());
    }
    state_->signal.notify_all();
  }

  bool stop(std::chrono::milliseconds deadline) noexcept override {
    bool ended = false;
    {
      std::unique_lock<std::mutex> lock(state_->mutex);
      state_->stopping = true;
      state_->signal.notify_all();
      ended = state_->signal.wait_for(
          lock, deadline, [this] { return state_->running == 0; });
    }
    for (std::thread& thread : threads_) {
      ended ? thread.join() : thread.detach();
    }
    threads_.clear();
    return ended;
  }

 private:
  // Held by the threads, too, which may outlive the object.
  struct State {
    explicit State(int descriptor)
        : file(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0)) {
      if (file.get() < 0) {
        throw std::system_error(errno, std::generic_category(), "dup");
      }
    }

    void work() noexcept {
      while (const std::shared_ptr<DiskJob> job = next()) {
        if (!job->wanted()) {
          job->end(ECANCELED);
          continue;
        }
        while (!job->advance(piece(*job))) {
        }
      }
    }

    std::shared_ptr<DiskJob> next() noexcept {
      std::unique_lock<std::mutex> lock(mutex);
      signal.wait(lock, [this] { return stopping || !queue.empty(); });
      if (stopping) {
        for (const std::shared_ptr<DiskJob>& job : queue) {
          job->end(ECANCELED);
        }
        queue.clear();
        --running;
        signal.notify_all();
        return nullptr;
      }
      std::shared_ptr<DiskJob> job = std::move(queue.front());
      queue.pop_front();
      return job;
    }

    int64_t piece(const DiskJob& job) const noexcept {
      std::byte* data = job.data.get() + job.moved;
      const uint64_t left = job.bytes - job.moved;
      const auto offset = static_cast<off_t>(job.offset + job.moved);
      const ssize_t result = job.kind == DiskJob::Kind::kRead
                                 ? ::pread(file.get(), data, left, offset)
                                 : ::pwrite(file.get(), data, left, offset);
      return result < 0 ? -errno : result;
    }

    const Descriptor file;
    std::mutex mutex;  // guards what follows
    std::condition_variable signal;
    std::deque<std::shared_ptr<DiskJob>> queue;
    int running = 0;
    bool stopping = false;
  };

  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<DiskIo> make_thread_io(int descriptor, int num_threads) {
  return std::make_unique<ThreadIo>(descriptor, num_threads);
}

}  // namespace pipetransformer::autocache
