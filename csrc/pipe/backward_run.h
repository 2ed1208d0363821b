// GPipe's backward of one PipeCall, queued on the workers: starts at once, and
// is waited for stage by stage.
//
// Thread safety: the results of a stage may be taken after wait_stage() for it
// has returned.
#pragma once

#include <memory>
#include <vector>

#include "pipe/cell_backward.h"
#include "pipe/execution.h"
#include "pipe/held_hooks.h"

namespace pipetransformer::pipe {

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
  void start(WorkerPool& pool, std::shared_ptr<const Schedule> schedule);
  // Waits for a stage's last cell; throws what a cell has thrown.
  void wait_stage(int32_t stage);
  void wait_all();

  Tensors take_parameter_grads(int32_t stage) {
    return cells_.take_parameter_grads(stage);
  }
  std::vector<Tensors> take_input_grads() {
    return cells_.take_input_grads();
  }

 private:
  Execution::Body make_body(const std::shared_ptr<const Schedule>& schedule);
  std::shared_ptr<void> enter();
  void clean_up();

  const std::shared_ptr<PipeCall> call_;
  CellBackward cells_;
  HeldHooks held_hooks_;
  std::shared_ptr<Execution> execution_;
};

}  // namespace pipetransformer::pipe
