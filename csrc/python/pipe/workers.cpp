#include "python/pipe/workers.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <utility>

#include "pipe/cell_trace.h"
#include "python/pipe/stages.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

namespace {

constexpr std::chrono::milliseconds kPollInterval{100};

// Threads need the GIL to end, so a pool is never joined with it held.
void destroy_pool(std::unique_ptr<pipe::WorkerPool> pool) {
  // After the interpreter there is no GIL, and no thread left to join.
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const py::gil_scoped_release no_gil;
    pool.reset();
  }
}

// Note [Threads end before the interpreter]
// A thread that still has Python state when the interpreter goes would abort
// the process, so all threads end at exit. A pool may outlive every Python
// object: a graph owns it as well. So pools are listed where they are made.
// Calls of daemon threads still run at exit: they fail before their next cell.
class PoolRegistry {
 public:
  static PoolRegistry& instance() {
    static PoolRegistry registry;
    return registry;
  }

  void add(const PoolPtr& pool) {
    const std::lock_guard lock(mutex_);
    std::erase_if(pools_, [](const auto& known) { return known.expired(); });
    pools_.push_back(pool);
  }

  std::vector<PoolPtr> alive() {
    const std::lock_guard lock(mutex_);
    std::vector<PoolPtr> pools;
    for (const auto& known : pools_) {
      if (PoolPtr pool = known.lock()) {
        pools.push_back(std::move(pool));
      }
    }
    return pools;
  }

 private:
  std::mutex mutex_;  // held for moments, and never while a pool is destroyed
  std::vector<std::weak_ptr<pipe::WorkerPool>> pools_;
};

// Waits until all calls are over, bounded by them, and raises their failure.
// Looks up every 100 ms for signals: what their handler raises comes first, and
// lets the running calls end and no further one begin.
void wait_to_end(
    std::unique_lock<std::mutex>& lock,
    std::condition_variable& changed,
    const std::function<bool()>& over,
    std::size_t& first_failure,
    std::exception_ptr& error) {
  std::exception_ptr failure;
  while (!changed.wait_for(lock, kPollInterval, over)) {
    lock.unlock();
    try {
      check_signals();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure != nullptr) {
      first_failure = 0;
    }
  }
  if (failure == nullptr) {
    failure = std::exchange(error, nullptr);
  }
  if (failure != nullptr) {
    std::rethrow_exception(std::move(failure));
  }
}

// The calls of one map() and what became of them.
struct MapRun {
  py::object function;
  std::vector<py::object> items;
  std::vector<py::object> results;
  at::ThreadLocalState context;
  // The former leaves it out.
  bool autocast_cache = at::autocast::is_autocast_cache_enabled();
  std::mutex mutex;
  std::condition_variable changed;
  int num_running = 0;
  std::size_t first_failure = SIZE_MAX;
  std::exception_ptr error;

  void run(std::size_t first, std::size_t stride) noexcept {
    const bool previous_cache = at::autocast::is_autocast_cache_enabled();
    for (std::size_t k = first; k < items.size(); k += stride) {
      {
        const std::lock_guard lock(mutex);
        if (k > first_failure) {
          break;
        }
      }
      const at::ThreadLocalStateGuard guard(context);
      at::autocast::set_autocast_cache_enabled(autocast_cache);
      const py::gil_scoped_acquire gil;
      try {
        results[k] = function(items[k]);
      } catch (...) {
        // What it replaces goes when the lock is free: Python may run then.
        std::exception_ptr raised = std::current_exception();
        const std::lock_guard lock(mutex);
        if (k < first_failure) {
          first_failure = k;
          std::swap(raised, error);
        }
      }
    }
    at::autocast::set_autocast_cache_enabled(previous_cache);
    const std::lock_guard lock(mutex);
    --num_running;
    changed.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex);
    wait_to_end(
        lock,
        changed,
        [this] { return num_running == 0; },
        first_failure,
        error);
  }
};

}  // namespace

PoolPtr make_pool(int num_workers, int intra_op_threads) {
  if (intra_op_threads < 1) {
    throw py::value_error(
        "intra_op_threads: expected at least 1, got " +
        std::to_string(intra_op_threads));
  }
  const py::gil_scoped_release no_gil;
  // Also the default of threads made later: the caller's value is put back.
  const int callers_threads = at::get_num_threads();
  pipe::WorkerPool::ThreadHooks hooks;
  hooks.start = [intra_op_threads] {
    at::set_num_threads(intra_op_threads);
    // A thread takes the process-wide number when it first asks: ask now,
    // before the caller's is put back.
    static_cast<void>(at::get_num_threads());
    // One Python thread state for the thread's life: cells do not pay for it,
    // and Python's thread-local data survives between them.
    static_cast<void>(PyGILState_Ensure());
    static_cast<void>(PyEval_SaveThread());
  };
  hooks.stop = [] {
    PyThreadState* const state = PyGILState_GetThisThreadState();
    PyEval_RestoreThread(state);
    // Not PyGILState_Release: it counts the state as unused before it clears
    // it, and a tensor that dies then (in thread-local data, say) takes and
    // gives back the GIL, which deletes the state a first time.
    PyThreadState_Clear(state);
    PyThreadState_DeleteCurrent();
  };
  hooks.borrow = [intra_op_threads]() -> std::shared_ptr<void> {
    const int callers = at::get_num_threads();
    if (callers == intra_op_threads) {
      return nullptr;
    }
    at::set_num_threads(intra_op_threads);
    return {nullptr, [callers](void*) { at::set_num_threads(callers); }};
  };
  auto pool = std::make_unique<pipe::WorkerPool>(num_workers, std::move(hooks));
  at::set_num_threads(callers_threads);
  PoolPtr shared(pool.release(), [](pipe::WorkerPool* raw) {
    destroy_pool(std::unique_ptr<pipe::WorkerPool>(raw));
  });
  PoolRegistry::instance().add(shared);
  return shared;
}

void shutdown_all_pools() {
  const std::vector<PoolPtr> pools = PoolRegistry::instance().alive();
  for (const PoolPtr& pool : pools) {
    pool->give_up();  // a call of a daemon thread may have hours to go
  }
  for (const PoolPtr& pool : pools) {
    pool->shutdown();
  }
}

bool drain_pool(const PoolPtr& pool, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const py::gil_scoped_release no_gil;
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  for (const std::future<void>& done : pool->when_done()) {
    while (done.wait_for(kPollInterval) != std::future_status::ready) {
      check_signals();
      if (Clock::now() >= deadline) {
        return false;
      }
    }
  }
  return true;
}

SpareRun::SpareRun(
    pipe::WorkerPool* pool,
    py::object function,
    std::vector<py::object> items)
    : pool_(pool),
      owner_(getpid()),
      function_(std::move(function)),
      items_(std::move(items)),
      autocast_cache_(at::autocast::is_autocast_cache_enabled()),
      num_open_(items_.size()),
      first_failure_(SIZE_MAX) {}

std::shared_ptr<SpareRun> SpareRun::start(
    const PoolPtr& pool,
    py::object function,
    std::vector<py::object> items) {
  // make_shared cannot reach the private constructor.
  const std::shared_ptr<SpareRun> run(
      new SpareRun(pool.get(), std::move(function), std::move(items)));
  std::vector<pipe::WorkerPool::Task> pieces;
  for (std::size_t k = 0; k < run->items_.size(); ++k) {
    pieces.emplace_back([run, k] { run->run_piece(k); });
  }
  const py::gil_scoped_release no_gil;
  pool->add_spare(std::move(pieces));
  return run;
}

void SpareRun::run_piece(std::size_t item) noexcept {
  bool begins = false;
  bool more = false;
  {
    const std::lock_guard lock(mutex_);
    begins = item < first_failure_;
  }
  if (begins) {
    const bool previous_cache = at::autocast::is_autocast_cache_enabled();
    {
      const at::ThreadLocalStateGuard guard(context_);
      at::autocast::set_autocast_cache_enabled(autocast_cache_);
      const py::gil_scoped_acquire gil;
      try {
        const pipe::CellTimer timer(
            pipe::kSparePiece,
            pool_->this_worker().value_or(0),
            static_cast<int32_t>(item));
        more = function_(items_[item]).cast<bool>();
      } catch (...) {
        // What it replaces goes when the lock is free: Python may run then.
        std::exception_ptr error = std::current_exception();
        const std::lock_guard lock(mutex_);
        if (item < first_failure_) {
          first_failure_ = item;
          std::swap(error, error_);
        }
      }
    }
    at::autocast::set_autocast_cache_enabled(previous_cache);
  }
  if (!more) {
    end_item(item);
    return;
  }
  // In front: no more items are under way than there are workers, and what is
  // between two pieces is held for these alone. From a thread of the pool,
  // which takes pieces until it is joined.
  pool_->add_spare(
      {[self = shared_from_this(), item] { self->run_piece(item); }},
      pipe::WorkerPool::Place::kInFront);
}

void SpareRun::end_item(std::size_t item) noexcept {
  // The lock is taken with the GIL held, never the other way round.
  const py::gil_scoped_acquire gil;
  items_[item] = py::object();
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    last = --num_open_ == 0;
  }
  if (last) {
    function_ = py::object();
    changed_.notify_all();
  }
}

void SpareRun::wait() {
  if (owner_ != getpid()) {
    throw std::runtime_error(
        "workers: expected a wait in the process that made them, got one in a "
        "forked child");
  }
  std::unique_lock lock(mutex_);
  wait_to_end(
      lock,
      changed_,
      [this] { return num_open_ == 0; },
      first_failure_,
      error_);
}

void SpareRun::cancel() noexcept {
  if (owner_ != getpid()) {
    return;  // nothing runs there
  }
  std::exception_ptr untold;  // goes when the lock is free
  std::unique_lock lock(mutex_);
  first_failure_ = 0;
  changed_.wait(lock, [this] { return num_open_ == 0; });
  untold = std::exchange(error_, nullptr);
}

std::vector<py::object> map_on_pool(
    const PoolPtr& pool,
    py::object function,
    std::vector<py::object> items) {
  MapRun run;
  run.function = std::move(function);
  run.items = std::move(items);
  run.results.resize(run.items.size());
  const auto stride = static_cast<std::size_t>(pool->num_workers());
  std::vector<pipe::WorkerPool::Task> tasks;
  for (std::size_t w = 0; w < stride && w < run.items.size(); ++w) {
    tasks.emplace_back([&run, w, stride] { run.run(w, stride); });
  }
  run.num_running = static_cast<int>(tasks.size());
  {
    const py::gil_scoped_release no_gil;
    pool->submit(std::move(tasks));
    run.wait();
  }
  return std::move(run.results);
}

}  // namespace pipetransformer::bindings
