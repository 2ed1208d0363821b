#include "pipe/execution.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "pipe/cell_trace.h"

namespace pipetransformer::pipe {

// Note [Who waits for whom]
// A worker waits only for operations of a smaller clock, on counters, and every
// stage sets its counter to kOver when it ends, for whatever reason.
// check_linked makes sure that clocks fall along every wait, so the operation
// with the lowest clock never waits: some worker always moves, until all are
// over. A worker that waits takes spare work of the pool meanwhile, which waits
// for nothing. One dispatcher runs by rising clock and never waits at all.
// After a failure at clock c, operations of clock <= c still find what they
// wait for: it has a smaller clock, so it neither failed nor was left out. All
// other operations are left out, whether their counter reads kOver or not. A
// caller waits for workers only, so its wait is bounded by the stage calls; it
// looks up every 100 ms for signals.

namespace {

constexpr int32_t kOver = std::numeric_limits<int32_t>::max();
constexpr int32_t kNone = -1;
constexpr int kReadySpinRounds = 100;
constexpr std::chrono::milliseconds kPollInterval{100};
constexpr std::chrono::microseconds kShortSleep{50};

}  // namespace

Execution::Execution(
    std::shared_ptr<const Schedule> schedule,
    Body body,
    WorkerPool& pool)
    : schedule_(std::move(schedule)),
      body_(std::move(body)),
      pool_(pool),
      progress_(schedule_->size()),
      last_clock_(kOver),
      over_(schedule_->size(), false),
      num_using_body_(static_cast<int32_t>(schedule_->size())),
      num_running_(static_cast<int32_t>(schedule_->size())) {}

std::shared_ptr<Execution> Execution::start(
    WorkerPool& pool,
    std::shared_ptr<const Schedule> schedule,
    Dispatch dispatch,
    Body body) {
  check_linked(*schedule);
  const auto num_stages = static_cast<int32_t>(schedule->size());
  const bool serial = dispatch != Dispatch::kThreads;
  if (!serial && num_stages > pool.num_workers()) {
    throw std::invalid_argument(
        "workers: expected one per stage (" + std::to_string(num_stages) +
        "), got " + std::to_string(pool.num_workers()));
  }
  // make_shared cannot reach the private constructor.
  struct Access : Execution {
    Access(
        std::shared_ptr<const Schedule> schedule,
        Body body,
        WorkerPool& pool)
        : Execution(std::move(schedule), std::move(body), pool) {}
  };
  std::shared_ptr<Execution> run =
      std::make_shared<Access>(std::move(schedule), std::move(body), pool);
  if (dispatch == Dispatch::kHere) {
    pool.run_here([run] { run->run_serially(); });
    return run;
  }
  std::vector<WorkerPool::Task> tasks;
  if (serial) {
    tasks.emplace_back([run] { run->run_serially(); });
  }
  for (int32_t j = 0; j < num_stages && !serial; ++j) {
    tasks.emplace_back([run, j] { run->run_stage(j); });
  }
  pool.submit(std::move(tasks));
  return run;
}

void Execution::run_stage(int32_t stage) noexcept {
  Counter& counter = progress_[stage];
  std::shared_ptr<void> scope = enter();
  for (const Op& op : (*schedule_)[stage]) {
    if (!wait_for(op) || !run_op(stage, op)) {
      break;
    }
    counter.value.fetch_add(1, std::memory_order_acq_rel);
    counter.value.notify_all();
  }
  scope.reset();
  counter.value.store(kOver, std::memory_order_release);
  counter.value.notify_all();
  end_stage(stage);
}

void Execution::run_serially() noexcept {
  std::shared_ptr<void> scope = enter();
  std::size_t num_open = schedule_->size();
  const auto end = [&](int32_t stage) {
    if (--num_open == 0) {
      scope.reset();  // before the caller is told
    }
    end_stage(stage);
  };
  const auto end_stages = [&](const std::vector<planner::StageOp>& done) {
    for (const auto& [stage, index] : done) {
      if (static_cast<std::size_t>(index) + 1 == (*schedule_)[stage].size()) {
        end(stage);
      }
    }
  };
  for (std::size_t j = 0; j < schedule_->size(); ++j) {
    if ((*schedule_)[j].empty()) {
      end(static_cast<int32_t>(j));
    }
  }
  if (body_.run_together && !body_.groups.empty()) {
    const auto groups = body_.groups;  // the body goes with the last stage
    for (const auto& positions : groups) {
      run_group(positions);
      end_stages(positions);
    }
    return;
  }
  for (const auto& [stage, index] : planner::serial_order(*schedule_)) {
    const Op& op = (*schedule_)[stage][index];
    // What waits for a failed operation, or for one left out, is later too.
    if (op.clock <= last_clock_.load(std::memory_order_acquire)) {
      run_op(stage, op);
    }
    end_stages({{stage, index}});
  }
}

std::shared_ptr<void> Execution::enter() const {
  return body_.enter ? body_.enter() : nullptr;
}

void Execution::require_workers() const {
  if (pool_.given_up()) {
    throw std::runtime_error(
        "workers: expected open workers to the end of a call, got ones that "
        "are closed as the interpreter exits");
  }
}

// False when it failed.
bool Execution::run_op(int32_t stage, const Op& op) noexcept {
  try {
    require_workers();
    const CellTimer timer(op.kind, stage, op.microbatch);
    body_.run(stage, op);
    return true;
  } catch (...) {
    fail(op.clock, stage, std::current_exception());
    return false;
  }
}

// After a failure nothing that belongs together is run in part.
void Execution::run_group(
    const std::vector<planner::StageOp>& positions) noexcept {
  std::vector<OpOfStage> group;
  int32_t clock = kOver;
  for (const auto& [stage, index] : positions) {
    group.push_back({stage, &(*schedule_)[stage][index]});
    clock = std::min(clock, group.back().op->clock);
  }
  if (last_clock_.load(std::memory_order_acquire) != kOver) {
    return;
  }
  try {
    require_workers();
    // One call of autograd is one cell, of the stage where it begins.
    const CellTimer timer(
        group.front().op->kind,
        group.front().stage,
        group.front().op->microbatch);
    body_.run_together(group);
  } catch (...) {
    fail(clock, positions.front().stage, std::current_exception());
  }
}

void Execution::end_stage(int32_t stage) noexcept {
  Body finished;  // what it holds goes before the caller is told, lock released
  {
    const std::lock_guard lock(mutex_);
    if (--num_using_body_ == 0) {
      std::swap(finished, body_);
    }
  }
  finished = {};
  const std::lock_guard lock(mutex_);
  over_[stage] = true;
  --num_running_;
  changed_.notify_all();
}

// False when the operation must not start.
bool Execution::wait_for(const Op& op) const noexcept {
  for (const planner::StageProgress& wait : op.waits) {
    const std::atomic<int32_t>& done = progress_[wait.stage].value;
    int32_t seen = done.load(std::memory_order_acquire);
    for (int k = 0; k < kReadySpinRounds && seen < wait.count; ++k) {
      std::this_thread::yield();
      seen = done.load(std::memory_order_acquire);
    }
    while (seen < wait.count) {
      switch (pool_.run_spare()) {
        case WorkerPool::SpareStatus::kRan:
          break;
        case WorkerPool::SpareStatus::kOthersRun:  // who may leave more behind
          std::this_thread::sleep_for(kShortSleep);
          break;
        case WorkerPool::SpareStatus::kNone:
          done.wait(seen, std::memory_order_acquire);
      }
      seen = done.load(std::memory_order_acquire);
    }
  }
  return op.clock <= last_clock_.load(std::memory_order_acquire);
}

void Execution::fail(
    int32_t clock,
    int32_t stage,
    std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  const bool first = !failed_ || clock < failure_.clock ||
                     (clock == failure_.clock && stage < failure_.stage);
  if (first) {
    failure_ = {clock, stage, std::move(error)};
    failed_ = true;
  }
  if (clock < last_clock_.load(std::memory_order_relaxed)) {
    last_clock_.store(clock, std::memory_order_release);
  }
}

void Execution::cancel() noexcept {
  const std::lock_guard lock(mutex_);  // fail() must not raise it again
  last_clock_.store(kNone, std::memory_order_release);
}

// Waits for one stage (kNone: all); true when there is a failure.
bool Execution::wait_until_over(int32_t stage, const Poll* poll) {
  std::unique_lock lock(mutex_);
  const auto is_over = [&] {
    return num_running_ == 0 || (stage != kNone && !failed_ && over_[stage]);
  };
  while (!changed_.wait_for(lock, kPollInterval, is_over)) {
    if (poll != nullptr) {
      lock.unlock();
      (*poll)();
      lock.lock();
    }
  }
  return failed_;
}

void Execution::wait_stage(int32_t stage, const Poll& poll) {
  bool failed = false;
  try {
    failed = wait_until_over(stage, &poll);
    if (failed) {
      wait_until_over(kNone, &poll);
    }
  } catch (...) {
    cancel();
    wait_until_over(kNone, nullptr);
    throw;
  }
  if (failed) {
    // Moved out: a kept exception would keep its traceback's frames alive.
    std::exception_ptr error;
    {
      const std::lock_guard lock(mutex_);
      error = std::exchange(failure_.error, nullptr);
    }
    if (error == nullptr) {
      throw std::runtime_error("pipe: this run has failed before");
    }
    std::rethrow_exception(std::move(error));
  }
}

void Execution::wait_all(const Poll& poll) {
  wait_stage(kNone, poll);
}

}  // namespace pipetransformer::pipe
