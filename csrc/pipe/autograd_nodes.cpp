#include "pipe/autograd_nodes.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "pipe/backward_run.h"
#include "pipe/node_ptr.h"

namespace pipetransformer::pipe {

namespace {

using torch::autograd::edge_list;
using torch::autograd::variable_list;

// What the nodes of one call share; touched by the calling thread's backward
// and, for the output's node, by a device thread before it.
struct Shared {
  std::shared_ptr<WorkerPool> pool;
  std::shared_ptr<PipeCall> call;  // empty once backward has used it up
  std::shared_ptr<const BackwardPlan> plan;
  std::shared_ptr<BackwardRun> run;
};

at::Tensor make_token() {
  return at::empty({0}, at::device(at::kCPU).dtype(at::kFloat));
}

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
    if (c10::GradMode::is_enabled()) {
      throw std::runtime_error(
          "backward of a Pipe: expected create_graph=False, got True (double "
          "backward is not supported)");
    }
    if (shared_->call == nullptr) {
      throw std::runtime_error(
          "Trying to backward through the graph of a Pipe a second time: "
          "expected retain_graph=True in the first backward, got False");
    }
    variable_list by_position(rows_.size());
    for (std::size_t k = 0; k < grads.size(); ++k) {
      by_position[positions_[k]] = std::move(grads[k]);
    }
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    const auto run = std::make_shared<BackwardRun>(
        shared_->call,
        shared_->plan,
        scatter_grads(
            by_position, rows_, shared_->call->settings().num_microbatches),
        keep);
    run->start(
        *shared_->pool);  // refused: nothing has happened, hooks are back
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
  // The edges are: the stage below's token unless this is the lowest stage, the
  // parameters, and for the lowest stage the inputs of the call.
  StageNode(
      std::shared_ptr<Shared> shared,
      int32_t stage,
      RowLayout input_rows,
      std::vector<std::size_t> input_positions)
      : shared_(std::move(shared)),
        stage_(stage),
        input_rows_(std::move(input_rows)),
        input_positions_(std::move(input_positions)) {}

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
      for (std::size_t k = 0; k < input_positions_.size(); ++k) {
        results.push_back(
            gather_grads(grads, input_positions_[k], input_rows_[k]));
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
  const RowLayout input_rows_;
  const std::vector<std::size_t> input_positions_;
};

}  // namespace

Tensors connect(
    std::shared_ptr<WorkerPool> pool,
    std::shared_ptr<PipeCall> call,
    const CallInputs& inputs,
    const Gathered& outputs) {
  const int32_t num_stages = call->settings().num_stages;
  std::vector<std::size_t> positions;
  RowLayout input_rows;
  Tensors input_tensors;
  for (std::size_t p = 0; p < inputs.tensors.size(); ++p) {
    if (inputs.tensors[p].requires_grad()) {
      positions.push_back(p);
      input_rows.push_back(inputs.rows[p]);
      input_tensors.push_back(inputs.tensors[p]);
    }
  }
  auto plan = std::make_shared<BackwardPlan>();
  plan->first_stage = positions.empty() ? num_stages : 0;
  for (int32_t j = 0; j < num_stages; ++j) {
    if (!inputs.parameters[j].empty()) {
      plan->first_stage = std::min(plan->first_stage, j);
    }
    plan->parameters.push_back(
        torch::autograd::collect_next_edges(inputs.parameters[j]));
  }
  if (plan->first_stage == num_stages) {
    throw std::runtime_error(
        "pipe: expected a stage parameter or an input that requires grad, as "
        "an "
        "output does, got none (a stage may use a tensor that is not its own "
        "parameter)");
  }
  auto shared = std::make_shared<Shared>();
  shared->pool = std::move(pool);
  shared->call = std::move(call);
  shared->plan = plan;

  at::Tensor token;
  for (int32_t j = plan->first_stage; j < num_stages; ++j) {
    const bool lowest = j == plan->first_stage;
    const NodePtr node = make_node<StageNode>(
        shared,
        j,
        lowest ? input_rows : RowLayout(),
        lowest ? positions : std::vector<std::size_t>());
    edge_list edges;
    if (!lowest) {
      edges.push_back(torch::autograd::impl::gradient_edge(token));
    }
    edges.insert(
        edges.end(), plan->parameters[j].begin(), plan->parameters[j].end());
    if (lowest) {
      for (const at::Tensor& tensor : input_tensors) {
        edges.push_back(torch::autograd::impl::gradient_edge(tensor));
      }
    }
    node->set_next_edges(std::move(edges));
    token = make_token();
    torch::autograd::set_history(token, node);
  }

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
    at::Tensor tensor = outputs.tensors[p].detach();
    if (outputs.requires_grad[p]) {
      torch::autograd::set_history(tensor, node);
    }
    results.push_back(std::move(tensor));
  }
  return results;
}

}  // namespace pipetransformer::pipe
