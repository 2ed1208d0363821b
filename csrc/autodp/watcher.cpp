#include "autodp/watcher.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autodp/liveness.h"
#include "autodp/store_client.h"
#include "autodp/task_thread.h"

namespace pipetransformer::autodp {

namespace {

constexpr std::chrono::milliseconds kPoll{50};
constexpr char kAbortKey[] = "abort";
// How long the rank that serves the store waits for others to read the failure.
constexpr double kLingerS = 1.0;
// How long a broken connection waits for the account of the peer that broke it.
constexpr double kGraceS = 0.25;

std::string heartbeat_key(int rank) {
  return "hb/" + std::to_string(rank);
}

std::string seen_key(int rank) {
  return "seen/" + std::to_string(rank);
}

}  // namespace

struct Watcher::State {
  State(
      const c10::intrusive_ptr<c10d::Store>& shared_store,
      std::shared_ptr<FailureLatch> shared_latch,
      const WatcherOptions& chosen)
      : store(shared_store->clone()),
        latch(std::move(shared_latch)),
        options(chosen) {}

  c10::intrusive_ptr<c10d::Store> store;  // the store thread's own
  std::shared_ptr<FailureLatch> latch;
  const WatcherOptions options;
  // Rounds in which the store answered, counted once every rank has beaten. See
  // Note [Slow starts].
  std::atomic<int64_t> answers{0};

  std::mutex mutex;
  std::condition_variable changed;
  bool closing = false;
  std::atomic<bool> store_thread_runs{true};
  std::atomic<bool> monitor_thread_runs{true};

  std::mutex signal_mutex;
  int read_fd = -1;
  int forward_fd = -1;

  // Returns false when it is time to end.
  bool pause() {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, kPoll, [this] { return closing; });
    return !closing;
  }

  LivenessTracker make_tracker() const {
    return {
        options.heartbeat_timeout_s, options.start_timeout_s, steady_now_s()};
  }

  std::vector<std::string> heartbeat_keys() const {
    std::vector<std::string> keys;
    for (int rank = 0; rank < options.world_size; ++rank) {
      keys.push_back(heartbeat_key(rank));
    }
    return keys;
  }

  void fail(int rank, std::string phase, double deadline_s, std::string why) {
    Failure failure;
    failure.rank = rank;
    failure.phase = std::move(phase);
    failure.deadline_s = deadline_s;
    failure.reason = std::move(why);
    latch->fail(std::move(failure));
  }

  void run_store_thread() noexcept;
  void watch_store();
  void beat(int64_t counter, LivenessTracker& successor);
  void spread(const Failure& failure);
  void run_monitor_thread() noexcept;
  void drain_signals();
};

// Note [Slow starts]
// A TCPStore server looks up the name of each client that connects, in the one
// thread that serves all of them: an unanswered name query stalls the store for
// five seconds or more (seen under load). All connections of a plane are made
// when it starts; until every rank has beaten once, silence gets the longer
// start timeout. For the same reason nothing connects to the store later:
// groups are built through the connection that the plane was given.

// ---- store thread

void Watcher::State::run_store_thread() noexcept {
  try {
    watch_store();
  } catch (const std::exception& error) {
    latch->fail(store_failure(options.store_rank, error));
  }
  store.reset();  // closes the connection here, also when nobody joins us
  store_thread_runs = false;
}

void Watcher::State::watch_store() {
  auto successor = make_tracker();
  int64_t counter = 0;
  double next_beat_s = steady_now_s();
  bool everyone_started = false;
  do {
    if (const auto abort = read_key(*store, kAbortKey)) {
      latch->fail(decode(*abort));
      break;
    }
    if (steady_now_s() >= next_beat_s) {
      next_beat_s = steady_now_s() + options.heartbeat_interval_s;
      beat(counter++, successor);
    }
    everyone_started = everyone_started || store->check(heartbeat_keys());
    if (everyone_started) {
      answers.fetch_add(1);
    }
  } while (!latch->failed() && pause());
  if (const auto failure = latch->failure()) {
    spread(*failure);
  }
}

// The first writer's account stays. Everyone says that it has read it, so that
// the rank that serves the store does not take the store away before.
void Watcher::State::spread(const Failure& failure) {
  store->compareSet(kAbortKey, "", encode(failure));
  store->set(seen_key(options.rank), std::string("1"));
  if (options.rank != options.store_rank) {
    return;
  }
  std::vector<std::string> keys;
  for (int rank = 0; rank < options.world_size; ++rank) {
    keys.push_back(seen_key(rank));
  }
  const double end_s = steady_now_s() + kLingerS;
  while (!store->check(keys) && steady_now_s() < end_s) {
    std::this_thread::sleep_for(kPoll / 5);
  }
}

void Watcher::State::beat(int64_t counter, LivenessTracker& successor) {
  store->set(heartbeat_key(options.rank), std::to_string(counter));
  if (options.world_size == 1) {
    return;
  }
  const int next = (options.rank + 1) % options.world_size;
  std::optional<int64_t> seen;
  if (const auto value = read_key(*store, heartbeat_key(next))) {
    seen = std::stoll(*value);
  }
  if (!successor.observe(seen, steady_now_s())) {
    fail(next, "heartbeat", options.heartbeat_timeout_s, "no heartbeat");
  }
}

// ---- monitor thread

void Watcher::State::run_monitor_thread() noexcept {
  auto store_thread = make_tracker();
  do {
    drain_signals();
    latch->confirm(steady_now_s(), kGraceS);
    const auto rounds = answers.load();
    const auto seen = rounds > 0 ? std::optional(rounds) : std::nullopt;
    if (!store_thread.observe(seen, steady_now_s())) {
      fail(
          options.store_rank,
          "store",
          options.heartbeat_timeout_s,
          "the store does not answer");
      break;
    }
  } while (pause());
  monitor_thread_runs = false;
}

void Watcher::State::drain_signals() {
  const std::lock_guard lock(signal_mutex);
  std::array<char, 64> bytes{};
  while (read_fd >= 0) {
    const auto count = ::read(read_fd, bytes.data(), bytes.size());
    if (count <= 0) {
      return;  // empty: the pipe does not block
    }
    for (ssize_t i = 0; i < count; ++i) {
      if (bytes[static_cast<size_t>(i)] == SIGTERM) {
        fail(options.rank, "SIGTERM", -1, "the process was told to terminate");
      }
    }
    if (forward_fd >= 0 &&
        ::write(forward_fd, bytes.data(), static_cast<size_t>(count)) < 0) {
      forward_fd = -1;  // its reader is gone
    }
  }
}

// ---- the owner

Watcher::Watcher(
    const c10::intrusive_ptr<c10d::Store>& store,
    std::shared_ptr<FailureLatch> latch,
    const WatcherOptions& options)
    : state_(std::make_shared<State>(store, std::move(latch), options)),
      store_thread_([state = state_] { state->run_store_thread(); }),
      monitor_thread_([state = state_] { state->run_monitor_thread(); }) {
  pthread_setname_np(store_thread_.native_handle(), "pt-heartbeat");
  pthread_setname_np(monitor_thread_.native_handle(), "pt-monitor");
}

Watcher::~Watcher() {
  stop(std::chrono::milliseconds(0));
}

void Watcher::watch_signals(int read_fd, int forward_fd) {
  const std::lock_guard lock(state_->signal_mutex);
  state_->read_fd = read_fd;
  state_->forward_fd = forward_fd;
}

void Watcher::unwatch_signals() {
  state_->drain_signals();
  watch_signals(-1, -1);
}

void Watcher::stop(std::chrono::milliseconds deadline) noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->changed.notify_all();
  join_or_abandon(
      store_thread_, [this] { return !state_->store_thread_runs; }, deadline);
  join_or_abandon(
      monitor_thread_,
      [this] { return !state_->monitor_thread_runs; },
      deadline);
}

}  // namespace pipetransformer::autodp
