// Forward, loss and backward of one PipeCall in one schedule (1F1B, ZB-H1), and
// how its gradients reach autograd.
//
// The last stage's output of each micro-batch is its loss. When run() returns
// the gradients are ready; `connect_step` gives the loss a history that
// delivers them, scaled by the gradient that arrives.
#pragma once

#include <memory>
#include <vector>

#include "pipe/autograd_nodes.h"
#include "pipe/cell_backward.h"
#include "pipe/execution.h"
#include "pipe/pipe_call.h"

namespace pipetransformer::pipe {

class StepRun {
 public:
  // `weights`: of each micro-batch's loss in the mean; they add up to one.
  StepRun(
      std::shared_ptr<PipeCall> call,
      std::shared_ptr<const BackwardPlan> plan,
      std::vector<double> weights);

  // Runs the schedule and waits for its end; throws what a cell has thrown.
  void run(WorkerPool& pool, std::shared_ptr<const Schedule> schedule);

  const CallSettings& settings() const noexcept {
    return call_->settings();
  }
  CellBackward& cells() noexcept {
    return cells_;
  }

 private:
  void run_op(int32_t stage, const Op& op);

  const std::shared_ptr<PipeCall> call_;
  const std::shared_ptr<const BackwardPlan> plan_;
  const std::vector<double> weights_;
  CellBackward cells_;
};

// Weighted mean of the losses that the last stage gave, without history.
at::Tensor mean_loss(PipeCall& call, const std::vector<double>& weights);

// The loss with a history that delivers the step's gradients.
at::Tensor
connect_step(const at::Tensor& loss, StepRun& run, const ChainPlan& plan);

}  // namespace pipetransformer::pipe
