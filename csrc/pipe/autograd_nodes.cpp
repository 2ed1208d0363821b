#include "pipe/autograd_nodes.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <stdexcept>
#include <string>

#include "pipe/backward_run.h"

namespace pipetransformer::pipe {

namespace {

using torch::autograd::variable_list;

// What the nodes of one call share; touched by the calling thread's backward
// and, for the output's node, by a device thread before it.
struct Shared {
  Runner runner;
  std::shared_ptr<PipeCall> call;  // empty once backward has used it up
  std::shared_ptr<const BackwardPlan> plan;
  std::shared_ptr<BackwardRun> run;
};

class OutputNode : public torch::autograd::Node {
 public:
  // `positions`: which outputs carry gradient, in the order of `grads`.
  OutputNode(
      std::shared_ptr<Shared> shared,
      RowLayout rows,
      std::vector<std::size_t> positions)
      : shared_(std::move(shared)),
        rows_(std::move(rows)),
        positions_(std::move(positions)) {}

  variable_list apply(variable_list&& grads) override {
    refuse_double_backward();
    if (shared_->call == nullptr) {
      refuse_second_backward();
    }
    const CallSettings& settings = shared_->call->settings();
    variable_list by_position(rows_.size());
    for (std::size_t k = 0; k < grads.size(); ++k) {
      by_position[positions_[k]] = std::move(grads[k]);
    }
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    const auto run = std::make_shared<BackwardRun>(
        shared_->call,
        shared_->plan,
        scatter_grads(by_position, rows_, settings.num_microbatches),
        keep);
    Runner& runner = shared_->runner;
    // Refused: nothing has happened, hooks are back.
    run->start(
        *runner.pool,
        runner.schedules->get(
            planner::ScheduleCache::Part::kBackward,
            "",
            {settings.num_microbatches,
             settings.num_stages,
             settings.num_checkpointed,
             shared_->plan->first_stage},
            runner.rules));
    shared_->run = run;
    if (!keep) {
      shared_->call.reset();
    }
    return {make_token()};
  }
  std::string name() const override {
    return "PipeOutput";
  }

 private:
  const std::shared_ptr<Shared> shared_;
  const RowLayout rows_;
  const std::vector<std::size_t> positions_;
};

class StageNode : public torch::autograd::Node {
 public:
  // `inputs`: of the call, for the lowest stage; else empty.
  StageNode(
      std::shared_ptr<Shared> shared,
      int32_t stage,
      CarryingInputs inputs)
      : shared_(std::move(shared)), stage_(stage), inputs_(std::move(inputs)) {}

  variable_list apply(variable_list&& /*token*/) override {
    const std::shared_ptr<BackwardRun> run = shared_->run;
    if (run == nullptr) {
      throw std::runtime_error("pipe: no backward runs; please report");
    }
    const bool lowest = stage_ == shared_->plan->first_stage;
    // When the caller asks for the gradients of some stages only, nobody waits
    // for the others; do not return before they are over.
    if (lowest || !task_should_compute_output(0)) {
      run->wait_all();
    } else {
      run->wait_stage(stage_);
    }
    variable_list results;
    if (!lowest) {
      results.push_back(make_token());
    }
    for (at::Tensor& grad : run->take_parameter_grads(stage_)) {
      results.push_back(std::move(grad));
    }
    if (lowest) {
      const std::vector<Tensors> grads = run->take_input_grads();
      for (std::size_t k = 0; k < inputs_.positions.size(); ++k) {
        results.push_back(
            gather_grads(grads, inputs_.positions[k], inputs_.rows[k]));
      }
      shared_->run.reset();
    }
    return results;
  }
  std::string name() const override {
    return "PipeStage" + std::to_string(stage_);
  }

 private:
  const std::shared_ptr<Shared> shared_;
  const int32_t stage_;
  const CarryingInputs inputs_;
};

}  // namespace

Tensors connect(
    Runner runner,
    std::shared_ptr<PipeCall> call,
    const ChainPlan& plan,
    const Gathered& outputs) {
  check_has_stage(*plan.backward);
  auto shared = std::make_shared<Shared>();
  shared->runner = std::move(runner);
  shared->call = std::move(call);
  shared->plan = plan.backward;
  CarryingInputs kept = plan.inputs;
  kept.tensors.clear();  // a node must not own what leads to it
  const at::Tensor token =
      chain_nodes(plan, [&](int32_t stage, bool lowest) -> NodePtr {
        return make_node<StageNode>(
            shared, stage, lowest ? kept : CarryingInputs());
      });

  std::vector<std::size_t> carrying;
  for (std::size_t p = 0; p < outputs.tensors.size(); ++p) {
    if (outputs.requires_grad[p]) {
      carrying.push_back(p);
    }
  }
  const NodePtr node = make_node<OutputNode>(shared, outputs.rows, carrying);
  node->set_next_edges({torch::autograd::impl::gradient_edge(token)});
  Tensors results;
  for (std::size_t p = 0; p < outputs.tensors.size(); ++p) {
    results.push_back(
        outputs.requires_grad[p] ? with_history(outputs.tensors[p], node)
                                 : outputs.tensors[p].detach());
  }
  return results;
}

}  // namespace pipetransformer::pipe
