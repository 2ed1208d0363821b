// Worker pools as Python uses them: threads that may run Python, and map().
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
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

}  // namespace pipetransformer::bindings
