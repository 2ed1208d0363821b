// Worker pools as Python uses them: threads that may run Python, and map().
#pragma once

#include <pybind11/pybind11.h>

#include <ATen/ThreadLocalState.h>

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "pipe/worker_pool.h"

namespace pipetransformer::bindings {

// Threads need the GIL to end: the pointer's deleter releases it to join.
using PoolPtr = std::shared_ptr<pipe::WorkerPool>;

// Each thread computes with `intra_op_threads` threads; the caller's own number
// is left as it is. Throws py::value_error for numbers below 1.
PoolPtr make_pool(int num_workers, int intra_op_threads);

// Ends the threads of every pool of this process, as WorkerPool::shutdown does:
// those that only a graph keeps alive too. Call it without the GIL.
void shutdown_all_pools();

// Waits, without the GIL, until all that is queued so far is over; false when
// that takes longer than `timeout_s` seconds. Interrupted by signals.
bool drain_pool(const PoolPtr& pool, double timeout_s);

// fn(item k) on worker k % num_workers, in the caller's thread-local state;
// results in order. The failure with the lowest index is raised once all
// running calls have ended; items after it that had not started are left out.
std::vector<pybind11::object> map_on_pool(
    const PoolPtr& pool,
    pybind11::object function,
    std::vector<pybind11::object> items);

// Calls in parts, made by workers that have nothing else to do: fn(item) again
// and again, each time on any of them, until it returns false. In the maker's
// thread-local state. The pieces of different items run at the same time.
//
// Thread safety: wait() and cancel() may be called from any thread outside the
// pool; without the GIL. Ownership: queued pieces keep it alive.
class SpareRun : public std::enable_shared_from_this<SpareRun> {
 public:
  // With the GIL. Throws what WorkerPool::add_spare throws.
  static std::shared_ptr<SpareRun> start(
      const PoolPtr& pool,
      pybind11::object function,
      std::vector<pybind11::object> items);

  // Waits until all is over; raises the failure of the lowest item, and once
  // there is one begins no further piece of later items. A second call returns
  // at once. Interrupted by signals. In a forked child nothing runs: there it
  // throws std::runtime_error, and cancel() returns at once.
  void wait();

  // Begins no further piece, and waits until those that run are over.
  void cancel() noexcept;

 private:
  SpareRun(
      pipe::WorkerPool* pool,
      pybind11::object function,
      std::vector<pybind11::object> items);
  void run_piece(std::size_t item) noexcept;
  void end_item(std::size_t item) noexcept;

  pipe::WorkerPool* const pool_;  // for its threads alone, which it outlives
  const pid_t owner_;             // in a child process nothing runs
  pybind11::object function_;     // this and the items: gone when all is over
  std::vector<pybind11::object> items_;
  const at::ThreadLocalState context_;
  const bool autocast_cache_;  // the former leaves it out
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t num_open_;
  std::size_t first_failure_;  // no piece of this item or a later one begins
  std::exception_ptr error_;
};

}  // namespace pipetransformer::bindings
