// The pipelined backward of one PipeCall: recomputation and backward of its
// cells on the workers, and the gradients they give.
//
// Thread safety: as PipeCall; the results of a stage may be taken after
// wait_stage() for it has returned.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "pipe/execution.h"
#include "pipe/held_hooks.h"
#include "pipe/pipe_call.h"

namespace pipetransformer::pipe {

// Where backward delivers to, fixed at the end of the forward.
struct BackwardPlan {
  int32_t first_stage = 0;  // lowest stage with anything to do
  std::vector<torch::autograd::edge_list> parameters;  // by stage
};

class BackwardRun : public std::enable_shared_from_this<BackwardRun> {
 public:
  // `output_grads`: by micro-batch and output position; undefined where none.
  // `keep_graph` as in loss.backward(retain_graph=...). Call it in the context
  // that backward is to have (grad mode, autocast).
  BackwardRun(
      std::shared_ptr<PipeCall> call,
      std::shared_ptr<const BackwardPlan> plan,
      std::vector<Tensors> output_grads,
      bool keep_graph);
  ~BackwardRun();

  // Queues the cells and returns at once.
  void start(WorkerPool& pool);
  // Waits for a stage's last cell; throws what a cell has thrown.
  void wait_stage(int32_t stage);
  void wait_all();

  // Summed over micro-batches, in the order of BackwardPlan::parameters. Both
  // for use on the calling thread's current streams.
  Tensors take_parameter_grads(int32_t stage);
  // Gradients of the first stage's inputs, by micro-batch and position.
  std::vector<Tensors> take_input_grads();

 private:
  void clean_up();
  void run(int32_t stage, const Op& op);
  void backward_cell(CellId id);
  Tensors run_autograd(
      const torch::autograd::edge_list& roots,
      const Tensors& root_grads,
      bool keep_graph,
      const torch::autograd::edge_list& wanted);
  void add_parameter_grads(int32_t stage, const Tensors& grads);

  const std::shared_ptr<PipeCall> call_;
  const std::shared_ptr<const BackwardPlan> plan_;
  const bool keep_graph_;
  const CallerContext context_;
  HeldHooks held_hooks_;
  std::shared_ptr<Execution> execution_;
  // Gradient at the border above the stage that runs next, by micro-batch.
  std::vector<Tensors> grads_;
  std::vector<device::Mark> grad_marks_;  // after they were written
  std::vector<std::vector<c10::Device>> grad_devices_;  // where they are to go
  std::vector<Cell> recomputed_;           // by stage: the one in progress
  std::vector<Tensors> parameter_grads_;   // by stage
  std::vector<device::Mark> stage_marks_;  // by stage, after its last cell
};

}  // namespace pipetransformer::pipe
