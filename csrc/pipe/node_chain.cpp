#include "pipe/node_chain.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <stdexcept>

namespace pipetransformer::pipe {

ChainPlan plan_chain(const CallInputs& inputs) {
  const auto num_stages = static_cast<int32_t>(inputs.parameters.size());
  ChainPlan plan;
  for (std::size_t p = 0; p < inputs.tensors.size(); ++p) {
    if (inputs.tensors[p].requires_grad()) {
      plan.inputs.positions.push_back(p);
      plan.inputs.rows.push_back(inputs.rows[p]);
      plan.inputs.tensors.push_back(inputs.tensors[p]);
    }
  }
  auto backward = std::make_shared<BackwardPlan>();
  backward->first_stage = plan.inputs.positions.empty() ? num_stages : 0;
  for (int32_t j = 0; j < num_stages; ++j) {
    if (!inputs.parameters[j].empty()) {
      backward->first_stage = std::min(backward->first_stage, j);
    }
    backward->parameters.push_back(
        torch::autograd::collect_next_edges(inputs.parameters[j]));
  }
  plan.backward = std::move(backward);
  return plan;
}

void check_has_stage(const BackwardPlan& plan) {
  if (plan.first_stage == static_cast<int32_t>(plan.parameters.size())) {
    throw std::runtime_error(
        "pipe: expected a stage parameter or an input that requires grad, as "
        "an output does, got none (a stage may use a tensor that is not its "
        "own parameter)");
  }
}

at::Tensor make_token() {
  return at::empty({0}, at::device(at::kCPU).dtype(at::kFloat));
}

at::Tensor chain_nodes(
    const ChainPlan& plan,
    const std::function<NodePtr(int32_t stage, bool lowest)>& make) {
  const BackwardPlan& backward = *plan.backward;
  const auto num_stages = static_cast<int32_t>(backward.parameters.size());
  at::Tensor token;
  for (int32_t j = backward.first_stage; j < num_stages; ++j) {
    const bool lowest = j == backward.first_stage;
    const NodePtr node = make(j, lowest);
    torch::autograd::edge_list edges;
    if (!lowest) {
      edges.push_back(torch::autograd::impl::gradient_edge(token));
    }
    edges.insert(
        edges.end(),
        backward.parameters[j].begin(),
        backward.parameters[j].end());
    if (lowest) {
      for (const at::Tensor& tensor : plan.inputs.tensors) {
        edges.push_back(torch::autograd::impl::gradient_edge(tensor));
      }
    }
    node->set_next_edges(std::move(edges));
    token = make_token();
    torch::autograd::set_history(token, node);
  }
  return token;
}

at::Tensor with_history(const at::Tensor& tensor, const NodePtr& node) {
  at::Tensor result = tensor.detach();
  torch::autograd::set_history(result, node);
  return result;
}

void refuse_double_backward() {
  if (c10::GradMode::is_enabled()) {
    throw std::runtime_error(
        "backward of a Pipe: expected create_graph=False, got True (double "
        "backward is not supported)");
  }
}

void refuse_second_backward() {
  throw std::runtime_error(
      "Trying to backward through the graph of a Pipe a second time: "
      "expected retain_graph=True in the first backward, got False");
}

}  // namespace pipetransformer::pipe
