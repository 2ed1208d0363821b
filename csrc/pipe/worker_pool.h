// Worker threads, one per device slot, each with its own first-in-first-out
// queue, and one queue of spare work that they share: a worker takes of it when
// it has nothing else to do. Torch-free and Python-free: what a thread needs at
// its start (number of intra-op threads, a Python thread state) comes as hooks.
//
// Thread safety: submit() and shutdown() may be called from any thread but the
// pool's own. Ownership: tasks are destroyed on their worker. Fork: in a child
// process the pool is inert; it neither joins nor frees what the parent's
// threads use.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <vector>

namespace pipetransformer::pipe {

class WorkerPool {
 public:
  using Task = std::function<void()>;  // must not throw

  struct ThreadHooks {
    std::function<void()> start;  // first thing on each thread
    std::function<void()> stop;   // last thing on each thread
    // Makes the calling thread compute like a worker while the result lives.
    std::function<std::shared_ptr<void>()> borrow = {};
  };

  // Returns once every thread has run its start hook. Throws
  // std::invalid_argument unless num_workers is positive, std::runtime_error
  // where the system gives fewer threads; none is left then.
  WorkerPool(int num_workers, ThreadHooks hooks);
  // Runs what is queued, then joins. Bounded by the queued tasks.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int num_workers() const noexcept;

  // Queues tasks[w] on worker w (empty functions are left out), all or none
  // with respect to other callers: two runs whose tasks wait for each other
  // across workers therefore never interleave. Throws std::runtime_error after
  // shutdown, in a forked child, and on one of the pool's own threads.
  void submit(std::vector<Task> tasks);

  // Queues work for whichever worker stands still: one without a task, or one
  // whose task calls run_spare() while it waits. A task that gets ready
  // meanwhile waits until the piece is done, so pieces should be short. Pieces
  // are begun in this order, behind those that wait, or in front of them. A
  // worker that has slept in a task since before there were any stays asleep.
  // May be called from anywhere, the pool's own threads included; throws
  // std::runtime_error in a forked child, and after shutdown.
  enum class Place : uint8_t { kBehind, kInFront };
  void add_spare(std::vector<Task> pieces, Place place = Place::kBehind);

  // On a worker thread: runs a piece of spare work, if there is any.
  enum class SpareStatus : uint8_t {
    kRan,
    kOthersRun,  // none waits; one that runs may bring more
    kNone,
  };
  SpareStatus run_spare();

  // Runs the task on the calling thread, as worker 0 would. Throws
  // std::runtime_error after shutdown and in a forked child.
  void run_here(const Task& task);

  // One future per worker, ready once all that is queued on it so far is over,
  // spare work aside; none after shutdown and in a forked child, where nothing
  // runs. Throws std::runtime_error on one of the pool's own threads.
  std::vector<std::future<void>> when_done();

  // Processor seconds that each worker's thread has used so far, and for
  // worker 0 those of run_here(), waiting left out; threads that it computes
  // with besides its own are not counted. Empty after shutdown and in a forked
  // child. Throws std::system_error when the system keeps no such clock,
  // std::runtime_error on one of the pool's own threads.
  std::vector<double> cpu_seconds() const;

  // Runs what is queued, spare work too, then joins; idempotent. Throws
  // std::runtime_error on one of the pool's own threads.
  void shutdown();

  // Lets an Execution fail before its next operation, so that a shutdown that
  // follows waits for those alone that run.
  void give_up() noexcept;
  bool given_up() const noexcept;

  // Which of the pool's threads the calling one is; none where it is not one.
  std::optional<int> this_worker() const noexcept;

 private:
  bool is_forked_child() const noexcept;
  void refuse_forked_child() const;
  void refuse_own_threads() const;

  class Spare;
  class Worker;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pipetransformer::pipe
