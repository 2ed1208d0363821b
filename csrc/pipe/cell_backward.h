// Recomputation and backward of the cells of one PipeCall, and the gradients
// they give: summed over micro-batches for parameters.
//
// Thread safety: as PipeCall: operations of different stages run on different
// threads, and the schedule's order makes their data visible to each other. The
// results may be taken when the stage's operations are over.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "pipe/border_grads.h"
#include "pipe/context.h"
#include "pipe/execution.h"
#include "pipe/pipe_call.h"
#include "pipe/split_backward.h"
#include "planner/schedule/schedule.h"

namespace pipetransformer::pipe {

class CellBackward {
 public:
  // `context`: that of the backward, with the streams of the forward.
  // `keep_graph` as in loss.backward(retain_graph=...); without it a cell is
  // freed by its backward. Not to be combined with split backward. `casts`: of
  // the run that this is part of.
  CellBackward(
      std::shared_ptr<PipeCall> call,
      std::shared_ptr<const BackwardPlan> plan,
      CallerContext context,
      bool keep_graph,
      std::shared_ptr<StageCasts> casts);

  // See BorderGrads.
  void set_output_grads(
      int32_t microbatch,
      Tensors grads,
      const device::Mark& written) {
    borders_.set_output_grads(microbatch, std::move(grads), written);
  }

  // R, B, I or W of one cell, whose predecessors are over. Inside a CallerScope
  // of context().
  void run(int32_t stage, const planner::Op& op);
  // A group of planner::backward_columns, for linked cells.
  void run_together(const std::vector<Execution::OpOfStage>& group);
  // See CallSettings::linked. Linked cells are only run in columns: backward of
  // a single one would run on into those below where they share a parameter.
  bool linked() const;

  const CallerContext& context() const noexcept {
    return context_;
  }

  // For use on the calling thread's current streams.
  // Summed over micro-batches, in the order of BackwardPlan::parameters.
  Tensors take_parameter_grads(int32_t stage);
  // Gradients of the first stage's inputs, by micro-batch and position.
  std::vector<Tensors> take_input_grads() {
    return borders_.take_input_grads();
  }

 private:
  // A cell whose backward is about to run.
  struct Open {
    CellId id;
    Cell cell;
    GraphEnds ends;
    Tensors grads;  // at ends.outputs
  };
  Open open(CellId id, bool takes_grads);
  void recompute(const std::vector<CellId>& ids);
  void backward_cell(CellId id);
  void input_grads(CellId id);
  void run_column(const std::vector<CellId>& ids);
  void weight_grads(CellId id);
  void hand_down(CellId id, const Cell& cell, Tensors grads);
  // Gradients of the inputs; what is left for the parameters goes to
  // `weight_passes_`, or is done at once where the graph cannot be split.
  Tensors
  split_cell(CellId id, const GraphEnds& ends, const Tensors& output_grads);
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
  const std::shared_ptr<StageCasts> casts_;
  BorderGrads borders_;
  std::vector<Cell> recomputed_;           // by stage, then micro-batch
  std::vector<WeightPass> weight_passes_;  // by stage, then micro-batch
  std::vector<Tensors> parameter_grads_;   // by stage
  std::vector<device::Mark> stage_marks_;  // by stage, after its last operation
};

}  // namespace pipetransformer::pipe
