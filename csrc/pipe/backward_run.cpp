#include "pipe/backward_run.h"

namespace pipetransformer::pipe {

BackwardRun::BackwardRun(
    std::shared_ptr<PipeCall> call,
    std::shared_ptr<const BackwardPlan> plan,
    std::vector<Tensors> output_grads,
    bool keep_graph)
    : call_(std::move(call)),
      cells_(
          call_,
          plan,
          CallerContext::with_streams_of(call_->context()),
          keep_graph,
          call_->new_casts()),
      held_hooks_(plan->parameters) {
  const device::Mark written =
      call_->streams().mark(call_->settings().devices.back());
  for (std::size_t i = 0; i < output_grads.size(); ++i) {
    cells_.set_output_grads(
        static_cast<int32_t>(i), std::move(output_grads[i]), written);
  }
  call_->streams().begin();
}

BackwardRun::~BackwardRun() {
  if (execution_ != nullptr) {
    execution_->cancel();  // nobody is left to take the results
  }
}

void BackwardRun::start(
    WorkerPool& pool,
    std::shared_ptr<const Schedule> schedule) {
  const CallSettings& settings = call_->settings();
  if (settings.num_checkpointed > 0) {
    check_workers_can_draw(settings.draw_mode != DrawMode::kFallback);
  }
  execution_ =
      Execution::start(pool, schedule, settings.dispatch, make_body(schedule));
}

// Nobody is left to take the results: the operations do nothing.
Execution::Body
BackwardRun::make_body(const std::shared_ptr<const Schedule>& schedule) {
  const std::weak_ptr<BackwardRun> self = weak_from_this();
  const auto restore_hooks =
      [schedule](BackwardRun& run, int32_t stage, const Op& op) {
        if (&op == &(*schedule)[stage].back()) {
          run.held_hooks_.restore(stage);
        }
      };
  Execution::Body body;
  body.run = [self, restore_hooks](int32_t stage, const Op& op) {
    if (const auto run = self.lock()) {
      run->cells_.run(stage, op);
      restore_hooks(*run, stage, op);
    }
  };
  if (cells_.linked()) {
    body.groups =
        planner::backward_columns(*schedule, call_->sums_within_cells());
    body.run_together = [self, restore_hooks](const auto& group) {
      if (const auto run = self.lock()) {
        run->cells_.run_together(group);
        for (const auto& [stage, op] : group) {
          restore_hooks(*run, stage, *op);
        }
      }
    };
  }
  body.enter = [self]() -> std::shared_ptr<void> {
    const auto run = self.lock();
    return run == nullptr ? nullptr : run->enter();
  };
  return body;
}

std::shared_ptr<void> BackwardRun::enter() {
  struct Entered {
    explicit Entered(const CallerContext& context) : caller(context) {}
    CallerScope caller;
    std::shared_ptr<void> outside;  // goes first
  };
  const auto entered = std::make_shared<Entered>(cells_.context());
  if (call_->settings().dispatch != Dispatch::kHere) {
    entered->outside = call_->stages().enter_backward();
  }
  return entered;
}

// After a failure, when every running call has ended.
void BackwardRun::clean_up() {
  held_hooks_.restore_all();
  call_->streams().join();
}

void BackwardRun::wait_stage(int32_t stage) {
  try {
    execution_->wait_stage(stage, [this] { call_->stages().poll(); });
  } catch (...) {
    clean_up();
    throw;
  }
}

void BackwardRun::wait_all() {
  try {
    execution_->wait_all([this] { call_->stages().poll(); });
  } catch (...) {
    clean_up();
    throw;
  }
}

}  // namespace pipetransformer::pipe
