#include "autodp/task_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace pipetransformer::autodp {

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

TaskThread::TaskThread(std::string name)
    : state_(std::make_shared<State>()),
      thread_([state = state_] { state->run(); }) {
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

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

}  // namespace pipetransformer::autodp
