#include "pipe/worker_pool.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace pipetransformer::pipe {

namespace {

// Brief: a busy neighbour on the same core must not pay for our waiting.
constexpr int kSpinRounds = 200;

int64_t thread_cpu_ns() {
  timespec used{};
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) != 0) {
    throw std::system_error(
        errno, std::generic_category(), "processor time of a thread");
  }
  return int64_t{1'000'000'000} * used.tv_sec + used.tv_nsec;
}

}  // namespace

// Work for whichever worker stands still.
class WorkerPool::Spare {
 public:
  // Does not wake anybody.
  void push(std::vector<WorkerPool::Task> pieces, WorkerPool::Place place) {
    const std::lock_guard lock(mutex_);
    pieces_.insert(
        place == WorkerPool::Place::kBehind ? pieces_.end() : pieces_.begin(),
        std::make_move_iterator(pieces.begin()),
        std::make_move_iterator(pieces.end()));
    num_queued_.store(pieces_.size(), std::memory_order_release);
  }

  bool any() const noexcept {
    return num_queued_.load(std::memory_order_acquire) > 0;
  }

  bool running() const noexcept {
    return num_running_.load(std::memory_order_acquire) > 0;
  }

  // Runs a piece; false when there is none. What it adds is there before it is
  // over.
  bool run() {
    const WorkerPool::Task piece = take();
    if (!piece) {
      return false;
    }
    piece();
    num_running_.fetch_sub(1, std::memory_order_release);
    return true;
  }

 private:
  // Empty when there is none.
  WorkerPool::Task take() {
    if (!any()) {
      return {};
    }
    const std::lock_guard lock(mutex_);
    if (pieces_.empty()) {
      return {};
    }
    WorkerPool::Task piece = std::move(pieces_.front());
    pieces_.pop_front();
    num_running_.fetch_add(1, std::memory_order_relaxed);
    num_queued_.store(pieces_.size(), std::memory_order_release);
    return piece;
  }

  std::mutex mutex_;
  std::deque<WorkerPool::Task> pieces_;
  std::atomic<std::size_t> num_queued_{0};
  std::atomic<int> num_running_{0};
};

// One thread and its queue.
class WorkerPool::Worker {
 public:
  Worker(const WorkerPool::ThreadHooks& hooks, Spare& spare)
      : spare_(spare), thread_([this, hooks] { main(hooks); }) {}

  void wait_started() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return started_; });
  }

  void push(WorkerPool::Task task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      num_queued_.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_one();
  }

  // Looks for spare work. Under the lock: else a worker that has just seen
  // none, and is about to wait, would miss it.
  void wake() {
    { const std::lock_guard lock(mutex_); }
    changed_.notify_one();
  }

  void stop_and_join() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) {
      thread_.join();
      id_.store({}, std::memory_order_release);  // another thread may get it
    }
  }

  double cpu_seconds() {
    clockid_t clock{};
    const int status = pthread_getcpuclockid(thread_.native_handle(), &clock);
    timespec used{};
    if (status != 0 || clock_gettime(clock, &used) != 0) {
      throw std::system_error(
          status != 0 ? status : errno,
          std::generic_category(),
          "processor time of a worker");
    }
    return static_cast<double>(used.tv_sec) +
           1e-9 * static_cast<double>(used.tv_nsec);
  }

  bool is_current() const noexcept {
    return id_.load(std::memory_order_acquire) == std::this_thread::get_id();
  }

 private:
  void main(const WorkerPool::ThreadHooks& hooks) noexcept {
    id_.store(std::this_thread::get_id(), std::memory_order_release);
    hooks.start();
    {
      const std::lock_guard lock(mutex_);
      started_ = true;
    }
    changed_.notify_one();
    while (WorkerPool::Task task = next()) {
      task();
    }
    hooks.stop();
  }

  // The next task; an empty one when stopping and nothing is queued. Spare work
  // is run until there is one.
  WorkerPool::Task next() {
    for (int k = 0; k < kSpinRounds; ++k) {
      if (num_queued_.load(std::memory_order_acquire) > 0 || spare_.any()) {
        break;
      }
      std::this_thread::yield();
    }
    while (true) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] {
          return stopping_ || !tasks_.empty() || spare_.any();
        });
        if (!tasks_.empty()) {
          WorkerPool::Task task = std::move(tasks_.front());
          tasks_.pop_front();
          num_queued_.fetch_sub(1, std::memory_order_relaxed);
          return task;
        }
        if (stopping_ && !spare_.any()) {
          return {};
        }
      }
      spare_.run();  // unless another worker was faster
    }
  }

  Spare& spare_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<WorkerPool::Task> tasks_;
  std::atomic<int> num_queued_{0};
  bool started_ = false;
  bool stopping_ = false;
  std::atomic<std::thread::id> id_{};  // read while another thread joins
  std::thread thread_;                 // last: starts when the rest is there
};

struct WorkerPool::State {
  std::mutex submitting;
  bool closed = false;
  std::atomic<bool> given_up{false};
  pid_t owner = getpid();
  Spare spare;
  std::vector<std::unique_ptr<Worker>> workers;  // after what they use
  std::function<std::shared_ptr<void>()> borrow;
  std::atomic<int64_t> here_ns{0};  // processor time of run_here()
};

WorkerPool::WorkerPool(int num_workers, ThreadHooks hooks) {
  if (num_workers < 1) {
    throw std::invalid_argument(
        "num_workers: expected at least 1, got " + std::to_string(num_workers));
  }
  state_ = std::make_unique<State>();
  state_->borrow = hooks.borrow;
  try {
    for (int w = 0; w < num_workers; ++w) {
      state_->workers.push_back(std::make_unique<Worker>(hooks, state_->spare));
    }
  } catch (const std::system_error& error) {
    const auto num_started = state_->workers.size();
    shutdown();  // ends those that run
    throw std::runtime_error(
        "workers: expected the system to give " + std::to_string(num_workers) +
        " threads, got " + std::to_string(num_started) + " and '" +
        error.code().message() + "' (limits: ulimit -u, pids.max)");
  } catch (...) {
    shutdown();
    throw;
  }
  for (const auto& worker : state_->workers) {
    worker->wait_started();
  }
}

WorkerPool::~WorkerPool() {
  if (is_forked_child()) {
    // A forked child has no such threads; their objects belong to the parent.
    static_cast<void>(state_.release());
    return;
  }
  shutdown();
}

int WorkerPool::num_workers() const noexcept {
  return static_cast<int>(state_->workers.size());
}

void WorkerPool::submit(std::vector<Task> tasks) {
  refuse_forked_child();
  refuse_own_threads();
  const std::lock_guard lock(state_->submitting);
  if (state_->closed) {
    throw std::runtime_error("workers: expected open workers, got closed ones");
  }
  for (std::size_t w = 0; w < tasks.size(); ++w) {
    if (tasks[w]) {
      state_->workers.at(w)->push(std::move(tasks[w]));
    }
  }
}

void WorkerPool::add_spare(std::vector<Task> pieces, Place place) {
  refuse_forked_child();
  // A worker of the pool that is being joined runs what it adds itself.
  std::unique_lock lock(state_->submitting, std::defer_lock);
  if (!this_worker()) {
    lock.lock();
    if (state_->closed) {
      throw std::runtime_error(
          "workers: expected open workers, got closed ones");
    }
  }
  state_->spare.push(std::move(pieces), place);
  for (const auto& worker : state_->workers) {
    worker->wake();
  }
}

WorkerPool::SpareStatus WorkerPool::run_spare() {
  Spare& spare = state_->spare;
  if (spare.run()) {
    return SpareStatus::kRan;
  }
  return spare.running() ? SpareStatus::kOthersRun : SpareStatus::kNone;
}

void WorkerPool::run_here(const Task& task) {
  refuse_forked_child();
  {
    const std::lock_guard lock(state_->submitting);
    if (state_->closed) {
      throw std::runtime_error(
          "workers: expected open workers, got closed ones");
    }
  }
  const std::shared_ptr<void> borrowed =
      state_->borrow ? state_->borrow() : nullptr;
  const int64_t before_ns = thread_cpu_ns();
  task();
  state_->here_ns += thread_cpu_ns() - before_ns;
}

std::vector<std::future<void>> WorkerPool::when_done() {
  std::vector<std::future<void>> futures;
  if (is_forked_child()) {
    return futures;
  }
  refuse_own_threads();
  const std::lock_guard lock(state_->submitting);
  if (state_->closed) {
    return futures;
  }
  for (const auto& worker : state_->workers) {
    // A task is copyable, a promise is not.
    const auto done = std::make_shared<std::promise<void>>();
    futures.push_back(done->get_future());
    worker->push([done] { done->set_value(); });
  }
  return futures;
}

std::vector<double> WorkerPool::cpu_seconds() const {
  std::vector<double> seconds;
  if (is_forked_child()) {
    return seconds;
  }
  refuse_own_threads();
  const std::lock_guard lock(state_->submitting);  // no join meanwhile
  if (state_->closed) {
    return seconds;
  }
  for (const auto& worker : state_->workers) {
    seconds.push_back(worker->cpu_seconds());
  }
  seconds.front() += 1e-9 * static_cast<double>(state_->here_ns.load());
  return seconds;
}

void WorkerPool::shutdown() {
  if (is_forked_child()) {
    return;
  }
  refuse_own_threads();  // one that joined itself would leave the rest running
  const std::lock_guard lock(state_->submitting);
  if (state_->closed) {
    return;
  }
  state_->closed = true;
  for (const auto& worker : state_->workers) {
    worker->stop_and_join();
  }
}

void WorkerPool::give_up() noexcept {
  state_->given_up.store(true, std::memory_order_release);
}

bool WorkerPool::given_up() const noexcept {
  return state_->given_up.load(std::memory_order_acquire);
}

bool WorkerPool::is_forked_child() const noexcept {
  return state_->owner != getpid();
}

void WorkerPool::refuse_forked_child() const {
  if (is_forked_child()) {
    throw std::runtime_error(
        "workers: expected a call in the process that made them, got one in a "
        "forked child");
  }
}

void WorkerPool::refuse_own_threads() const {
  if (this_worker()) {
    throw std::runtime_error(
        "workers: expected a call from outside, got one on a worker thread");
  }
}

std::optional<int> WorkerPool::this_worker() const noexcept {
  for (int w = 0; w < num_workers(); ++w) {
    if (state_->workers[w]->is_current()) {
      return w;
    }
  }
  return std::nullopt;
}

}  // namespace pipetransformer::pipe
