// A thread that runs tasks one after the other, with a bounded stop.
//
// Torch-free. post() may be called from any thread. Tasks must not throw.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace pipetransformer::autodp {

// Starts a thread that the system's tools show as `name`, at most 15
// characters. Throws std::runtime_error where the system gives no more threads
// (limits of a user's or a job's processes).
std::thread start_thread(const std::string& name, std::function<void()> body);

class TaskThread {
 public:
  // Throws as start_thread() does.
  explicit TaskThread(const std::string& name);
  // Stops with a deadline of zero: see stop().
  ~TaskThread();
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;

  // Returns false once stop() was called, and then leaves `task` untouched:
  // what it owns may be nothing to destroy in the calling thread.
  bool post(std::function<void()>&& task);

  // Lets queued tasks finish and joins the thread; returns true. When they do
  // not finish by the deadline the thread is left to itself and the result is
  // false. See Note [Abandoned threads].
  bool stop(std::chrono::milliseconds deadline) noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

// Runs `task` on a thread of its own and waits for its end, but no longer than
// until the deadline. Where the system gives no thread, `task` is not run, and
// what it owns lives as long as the process: it may be nothing to destroy in
// the calling thread.
void run_apart(
    const std::string& name,
    std::function<void()>&& task,
    std::chrono::milliseconds deadline) noexcept;

// Joins `thread` if `finished()` becomes true by the deadline, else leaves it
// to itself. Polls every millisecond.
bool join_or_abandon(
    std::thread& thread,
    const std::function<bool()>& finished,
    std::chrono::milliseconds deadline) noexcept;

}  // namespace pipetransformer::autodp
