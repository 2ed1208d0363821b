#include "autodp/failure/task_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace pipetransformer::autodp {

std::thread start_thread(const std::string& name, std::function<void()> body) {
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    return thread;
  } catch (const std::system_error& error) {
    throw std::runtime_error(
        "thread " + name + ": expected the system to give one more, got '" +
        error.code().message() + "' (limits: ulimit -u, pids.max)");
  }
}

// Note [Abandoned threads]
// A store client blocked in recv() on a stopped server, and a gloo group whose
// collective waits for a dead peer, cannot be woken by any call their owners
// offer. Joining such a thread would turn a peer's death into our hang, so
// after the deadline it is detached, the one place in the project that does so.
// The thread owns everything it touches (shared state, its own store client),
// and process exit does not wait for it.
bool join_or_abandon(
    std::thread& thread,
    const std::function<bool()>& finished,
    std::chrono::milliseconds deadline) noexcept {
  if (!thread.joinable()) {
    return true;
  }
  const auto end = std::chrono::steady_clock::now() + deadline;
  while (!finished()) {
    if (std::chrono::steady_clock::now() >= end) {
      thread.detach();
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  thread.join();
  return true;
}

struct TaskThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool closing = false;
  bool finished = false;

  void run() noexcept {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return closing || !tasks.empty(); });
      if (tasks.empty()) {
        break;
      }
      auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // what it owns dies here, not under the lock
      lock.lock();
    }
    finished = true;
  }
};

TaskThread::TaskThread(const std::string& name)
    : state_(std::make_shared<State>()),
      thread_(start_thread(name, [state = state_] { state->run(); })) {}

TaskThread::~TaskThread() {
  stop(std::chrono::milliseconds(0));
}

bool TaskThread::post(std::function<void()>&& task) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closing) {
      return false;
    }
    state_->tasks.push_back(std::move(task));
  }
  state_->changed.notify_one();
  return true;
}

bool TaskThread::stop(std::chrono::milliseconds deadline) noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->changed.notify_one();
  const auto finished = [this] {
    const std::lock_guard lock(state_->mutex);
    return state_->finished;
  };
  return join_or_abandon(thread_, finished, deadline);
}

void run_apart(
    const std::string& name,
    std::function<void()>&& task,
    std::chrono::milliseconds deadline) noexcept {
  std::optional<TaskThread> thread;
  try {
    thread.emplace(name);
  } catch (const std::runtime_error&) {
    auto kept = std::make_unique<std::function<void()>>(std::move(task));
    static_cast<void>(kept.release());
    return;
  }
  thread->post(std::move(task));
  thread->stop(deadline);
}

}  // namespace pipetransformer::autodp
