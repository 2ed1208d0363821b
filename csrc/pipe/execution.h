// One run of a Schedule on a WorkerPool: stage j on worker j, or all stages on
// worker 0 or the calling thread. Torch-free. See Note [Who waits for whom] in
// execution.cpp.
//
// Thread safety: the wait functions and cancel() may be called from any thread
// outside the pool. Ownership: the queued tasks keep the Execution and its body
// alive; it does not keep the pool alive, which outlives what its threads run.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "pipe/dispatch.h"
#include "pipe/worker_pool.h"
#include "planner/schedule/schedule.h"

namespace pipetransformer::pipe {

using planner::Op;
using planner::OpKind;
using planner::Schedule;

class Execution : public std::enable_shared_from_this<Execution> {
 public:
  struct OpOfStage {
    int32_t stage = 0;
    const Op* op = nullptr;
  };
  struct Body {
    // Runs one operation of a stage, on that stage's worker. May throw.
    std::function<void(int32_t stage, const Op& op)> run;
    // Where both are given, the one dispatcher runs these groups with this, and
    // not serial_order(); every operation is in one group, after what it waits
    // for or together with it.
    std::function<void(const std::vector<OpOfStage>& group)> run_together = {};
    std::vector<std::vector<planner::StageOp>> groups = {};
    // Called first on every thread; the result lives as long as the thread
    // works for this run.
    std::function<std::shared_ptr<void>()> enter = {};
  };
  // Called every 100 ms by a waiting caller; may throw to give up (signals).
  using Poll = std::function<void()>;

  // Queues the schedule and returns at once; with kHere, when it is over.
  // Throws std::invalid_argument when kThreads has more stages than workers,
  // std::logic_error for a schedule that could deadlock, std::runtime_error for
  // closed workers.
  static std::shared_ptr<Execution> start(
      WorkerPool& pool,
      std::shared_ptr<const Schedule> schedule,
      Dispatch dispatch,
      Body body);

  // Waits until the stage has run its list. When an operation of any stage has
  // failed, or been kept from its start by WorkerPool::give_up(): waits for all
  // stages, then throws the failure with the lowest
  // (clock, stage). When `poll` throws: cancels, waits for the running
  // operations to return, and lets that exception pass.
  void wait_stage(int32_t stage, const Poll& poll);
  void wait_all(const Poll& poll);

  // Starts no further operation; does not wait.
  void cancel() noexcept;

 private:
  struct alignas(64) Counter {
    std::atomic<int32_t> value{0};
  };
  struct Failure {
    int32_t clock = 0;
    int32_t stage = 0;
    std::exception_ptr error;
  };

  Execution(
      std::shared_ptr<const Schedule> schedule,
      Body body,
      WorkerPool& pool);
  void run_stage(int32_t stage) noexcept;
  void run_serially() noexcept;
  std::shared_ptr<void> enter() const;
  void require_workers() const;  // until the interpreter exits
  bool run_op(int32_t stage, const Op& op) noexcept;
  void run_group(const std::vector<planner::StageOp>& positions) noexcept;
  void end_stage(int32_t stage) noexcept;
  bool wait_for(const Op& op) const noexcept;
  void fail(int32_t clock, int32_t stage, std::exception_ptr error) noexcept;
  bool wait_until_over(int32_t stage, const Poll* poll);

  const std::shared_ptr<const Schedule> schedule_;
  Body body_;
  WorkerPool& pool_;                 // only for its own threads and run_here()
  std::vector<Counter> progress_;    // finished operations, or kOver
  std::atomic<int32_t> last_clock_;  // nothing of a later clock is started
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> over_;
  int32_t num_using_body_;
  int32_t num_running_;
  bool failed_ = false;
  Failure failure_;
};

}  // namespace pipetransformer::pipe
