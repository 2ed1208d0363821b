#include "autodp/failure/watcher.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autodp/failure/liveness.h"
#include "autodp/failure/task_thread.h"
#include "autodp/membership/rendezvous_board.h"
#include "autodp/store/store_client.h"

namespace pipetransformer::autodp {

namespace {

constexpr std::chrono::milliseconds kPoll{50};
// How long the rank that serves the store waits for others to read the failure.
constexpr double kLingerS = 1.0;
// How long a broken connection waits for an account if the store is slow.
constexpr double kGraceS = 0.25;
// How long the store thread gets to end where the other one did not start.
constexpr std::chrono::milliseconds kStartedDeadline{1000};

// Written by a rank that outlives the store, if the store does answer after
// all: the generation must then do without it.
std::string lost_key(const Generation& generation) {
  return generation.key("lost");
}

std::string seen_key(const Generation& generation, int rank) {
  return generation.key("seen/" + std::to_string(rank));
}

}  // namespace

struct Watcher::State {
  State(
      c10::intrusive_ptr<c10d::Store> own_store,
      std::shared_ptr<RunState> shared_run,
      const WatcherOptions& chosen)
      : store(std::move(own_store)),
        run(std::move(shared_run)),
        options(chosen) {}

  c10::intrusive_ptr<c10d::Store> store;  // the store thread's own
  std::shared_ptr<RunState> run;
  const WatcherOptions options;
  std::atomic<int64_t> answers{0};  // rounds in which the store answered

  std::mutex mutex;
  std::condition_variable changed;
  bool closing = false;
  std::atomic<bool> store_thread_runs{true};
  std::atomic<bool> monitor_thread_runs{true};

  std::mutex signal_mutex;
  int read_fd = -1;
  int forward_fd = -1;
  std::map<int, std::string> ends;  // phases by signal

  // Returns false when it is time to end.
  bool pause() {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, kPoll, [this] { return closing; });
    return !closing;
  }

  // Of the store thread itself, and of the successor in a generation. Every
  // rank is there when a plane is made, so its first beat is due like any
  // other: see Note [Slow starts].
  LivenessTracker make_tracker() const {
    const double timeout_s = options.heartbeat_timeout_s;
    return {timeout_s, timeout_s, steady_now_s()};
  }

  // Of the store thread alone.
  int64_t counter = 0;
  double next_beat_s = steady_now_s();

  void run_store_thread() noexcept;
  void watch_run();
  bool watch(const Generation& generation);
  bool gave_up_store() const;
  void look_for_news(const Generation& generation);
  void beat(const Generation& generation, Heartbeat& successor);
  void spread(const Generation& generation, const Failure& failure);
  void leave(const Generation& generation);
  void linger(const Generation& generation);
  void run_monitor_thread() noexcept;
  void drain_signals();
};

// Note [Slow starts]
// A TCPStore server looks up the name of each client that connects, in the one
// thread that serves all of them: an unanswered name query stalls the store for
// five seconds or more (seen under load). So every rank makes all connections
// of its plane before it joins the others (autodp/meeting.py), and none later:
// groups are built through the connections that the plane has, and later
// generations use them too. From the moment in which all have joined, silence
// of any length is that of a rank that is gone.

// Note [Accounts come first]
// A rank that fails by itself writes why, and only then closes its connections
// (ActiveGroup::retire waits for that). So a look at the store that began after
// a connection broke, and found no account, shows that there is none: the peer
// died, and the broken connection is the failure. Only where the store is slow
// to answer, or an account slow to be written, the monitor thread decides after
// kGraceS.

// ---- store thread

void Watcher::State::run_store_thread() noexcept {
  try {
    watch_run();
  } catch (const std::exception& error) {
    run->lose_store(store_failure(options.store_rank, error));
  }
  store.reset();  // closes the connection here, also when nobody joins us
  store_thread_runs = false;
}

void Watcher::State::watch_run() {
  std::shared_ptr<const Generation> generation;
  do {
    generation = run->generation();
  } while (watch(*generation));
  const bool failed = generation->latch->failed();
  if (gave_up_store()) {
    // It does answer, at least here. A rank that ends is missed by the others;
    // it says nothing of its loss, which may be that of its own connection
    // alone.
    if (failed) {
      leave(*generation);
    } else {
      store->set(lost_key(*generation), encode(*run->store_loss()));
    }
  } else if (failed) {
    leave(*generation);
    linger(*generation);
  }
}

bool Watcher::State::gave_up_store() const {
  return options.survives && run->store_loss().has_value();
}

// Returns true once another generation follows, false when it is time to end.
bool Watcher::State::watch(const Generation& generation) {
  Heartbeat successor(make_tracker());
  bool told = false;
  const auto tell = [&] {
    const auto failure = generation.latch->failure();
    if (failure.has_value() && !told && !gave_up_store()) {
      spread(generation, *failure);
      told = true;
    }
    return failure.has_value();
  };
  do {
    if (gave_up_store()) {
      return false;
    }
    if (run->generation()->number != generation.number) {
      return true;
    }
    const double looked_s = steady_now_s();
    look_for_news(generation);
    generation.latch->confirm(looked_s, 0);
    if (steady_now_s() >= next_beat_s) {
      next_beat_s = steady_now_s() + options.heartbeat_interval_s;
      beat(generation, successor);
    }
    answers.fetch_add(1);
    if (tell() && !options.survives) {
      return false;
    }
  } while (pause());
  tell();
  return false;
}

void Watcher::State::look_for_news(const Generation& generation) {
  if (generation.latch->failed()) {
    return;
  }
  if (options.survives) {
    if (const auto lost = read_key(*store, lost_key(generation))) {
      run->lose_store(decode(*lost));
      return;
    }
  }
  if (const auto abort = read_key(*store, generation.key("abort"))) {
    generation.latch->fail(decode(*abort));
  }
}

// The first writer's account stays. Everyone says that it has read it, so that
// the rank that serves the store does not take the store away before.
void Watcher::State::spread(
    const Generation& generation,
    const Failure& failure) {
  store->compareSet(generation.key("abort"), "", encode(failure));
  generation.latch->note_told();
  store->set(seen_key(generation, options.rank), std::string("1"));
}

// Tells survivors not to wait for this rank; an answer it gave before stays.
void Watcher::State::leave(const Generation& generation) {
  if (options.survives) {
    store->compareSet(
        answer_key(generation.number + 1, options.rank), "", kLeaves);
  }
}

void Watcher::State::linger(const Generation& generation) {
  if (options.rank != options.store_rank) {
    return;
  }
  std::vector<std::string> keys;
  for (const int rank : generation.members) {
    keys.push_back(seen_key(generation, rank));
  }
  const double end_s = steady_now_s() + kLingerS;
  while (!store->check(keys) && steady_now_s() < end_s) {
    std::this_thread::sleep_for(kPoll / 5);
  }
}

void Watcher::State::beat(const Generation& generation, Heartbeat& successor) {
  store->set(heartbeat_key(options.rank), std::to_string(counter++));
  const auto& members = generation.members;
  if (members.size() == 1 || generation.latch->failed()) {
    return;
  }
  auto next = std::upper_bound(members.begin(), members.end(), options.rank);
  if (next == members.end()) {
    next = members.begin();
  }
  const auto text = read_key(*store, heartbeat_key(*next));
  if (!successor.observe(text, steady_now_s())) {
    generation.latch->fail(Failure{
        *next, "heartbeat", -1, options.heartbeat_timeout_s, "no heartbeat"});
  }
}

// ---- monitor thread

void Watcher::State::run_monitor_thread() noexcept {
  auto store_thread = make_tracker();
  do {
    drain_signals();
    run->generation()->latch->confirm(steady_now_s(), kGraceS);
    const auto rounds = answers.load();
    const auto seen = rounds > 0 ? std::optional(rounds) : std::nullopt;
    const bool alive = store_thread.observe(seen, steady_now_s());
    if (!alive && store_thread_runs && !run->store_loss().has_value()) {
      run->lose_store(Failure{
          options.store_rank,
          "store",
          -1,
          options.heartbeat_timeout_s,
          "the store does not answer"});
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
      const auto found = ends.find(bytes[static_cast<size_t>(i)]);
      if (found != ends.end()) {
        run->fail(Failure{
            options.rank,
            found->second,
            -1,
            -1,
            "the process was told to terminate"});
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
    c10::intrusive_ptr<c10d::Store> store,
    std::shared_ptr<RunState> run,
    const WatcherOptions& options)
    : state_(
          std::make_shared<State>(std::move(store), std::move(run), options)),
      store_thread_(start_thread("pt-heartbeat", [state = state_] {
        state->run_store_thread();
      })) {
  try {
    monitor_thread_ = start_thread(
        "pt-monitor", [state = state_] { state->run_monitor_thread(); });
  } catch (...) {
    stop(kStartedDeadline);  // no destructor will
    throw;
  }
}

Watcher::~Watcher() {
  stop(std::chrono::milliseconds(0));
}

void Watcher::watch_signals(
    int read_fd,
    int forward_fd,
    std::map<int, std::string> ends) {
  const std::lock_guard lock(state_->signal_mutex);
  state_->read_fd = read_fd;
  state_->forward_fd = forward_fd;
  state_->ends = std::move(ends);
}

void Watcher::unwatch_signals() {
  state_->drain_signals();
  watch_signals(-1, -1, {});
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
