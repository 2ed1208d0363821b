#include "pipe/split_backward.h"

#include <unordered_map>
#include <utility>

namespace pipetransformer::pipe {

// Note [Two passes over one graph]
// Call a node "inner" when an input can be reached from it. The first pass asks
// for the inputs' gradients only, so of every inner node it computes just the
// gradients that flow on towards the inputs: autograd asks each node for the
// outputs that are needed. A node "branches" when one of its edges leaves the
// inner nodes towards a parameter (the matrix product of a linear layer, say).
// The gradient that arrives there is captured in the first pass and is all that
// the parameter's gradient needs. The second pass starts from the branching
// nodes, with their edges towards the inputs taken away, and so computes
// exactly what the first one left out. Nodes between a branching node and its
// parameters (the transpose of a weight) run in the second pass alone.

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

struct Reach {
  bool input = false;
  bool parameter = false;
};

// What can be reached from each node of the graph.
class ReachMap {
 public:
  explicit ReachMap(const GraphEnds& ends) {
    for (const Edge& edge : ends.parameters) {
      reach_[edge.function.get()].parameter = true;
    }
    for (const Edge& edge : ends.inputs) {
      if (edge.is_valid()) {
        reach_[edge.function.get()].input = true;
      }
    }
    for (const Edge& edge : ends.outputs) {
      visit(edge.function);
    }
  }

  Reach of(const Edge& edge) const {
    if (!edge.is_valid()) {
      return {};
    }
    const auto found = reach_.find(edge.function.get());
    return found == reach_.end() ? Reach() : found->second;
  }

  // In the order in which they were left: a node after what it leads to.
  const std::vector<NodePtr>& nodes() const noexcept {
    return nodes_;
  }

 private:
  // Depth first, without recursion: graphs of deep stages are deep.
  void visit(const NodePtr& root) {
    if (root == nullptr || !reach_.try_emplace(root.get()).second) {
      return;
    }
    std::vector<std::pair<NodePtr, std::size_t>> stack{{root, 0}};
    while (!stack.empty()) {
      auto& [node, next] = stack.back();
      const edge_list& edges = node->next_edges();
      if (next < edges.size()) {
        const NodePtr& child = edges[next++].function;
        if (child != nullptr && reach_.try_emplace(child.get()).second) {
          stack.emplace_back(child, 0);
        }
        continue;
      }
      Reach reach;
      for (const Edge& edge : edges) {
        const Reach beyond = of(edge);
        reach.input = reach.input || beyond.input;
        reach.parameter = reach.parameter || beyond.parameter;
      }
      reach_[node.get()] = reach;
      nodes_.push_back(std::move(node));
      stack.pop_back();
    }
  }

  std::unordered_map<const Node*, Reach> reach_;
  std::vector<NodePtr> nodes_;
};

// Torch's own functions compute what is asked for and nothing else.
bool may_run_twice(Node& node) {
  return dynamic_cast<torch::autograd::TraceableFunction*>(&node) != nullptr &&
         node.pre_hooks().empty() && node.post_hooks().empty() &&
         node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty();
}

}  // namespace

std::optional<BackwardSplit> BackwardSplit::make(const GraphEnds& ends) {
  const ReachMap reach(ends);
  BackwardSplit split;
  for (const NodePtr& node : reach.nodes()) {
    Branching branching{node, {}};
    bool leaves = false;
    const edge_list& edges = std::as_const(*node).next_edges();
    for (std::size_t k = 0; k < edges.size(); ++k) {
      const Reach beyond = reach.of(edges[k]);
      if (beyond.input) {
        branching.to_inputs.push_back(k);
      }
      leaves = leaves || (beyond.parameter && !beyond.input);
    }
    if (branching.to_inputs.empty() || !leaves) {
      continue;
    }
    if (!may_run_twice(*node)) {
      return std::nullopt;
    }
    for (uint32_t k = 0; k < node->num_inputs(); ++k) {
      split.captures_.emplace_back(node, k);
    }
    split.branching_.push_back(std::move(branching));
  }
  for (const Edge& edge : ends.outputs) {
    const Reach beyond = reach.of(edge);
    split.output_is_root_.push_back(beyond.parameter && !beyond.input);
  }
  return split;
}

WeightPass BackwardSplit::finish(
    Tensors captured,
    const edge_list& outputs,
    const Tensors& output_grads) {
  for (const Branching& branching : branching_) {
    for (const std::size_t k : branching.to_inputs) {
      branching.node->next_edges()[k] = Edge();
    }
  }
  WeightPass pass;
  const auto add = [&pass](const Edge& edge, at::Tensor grad) {
    if (grad.defined()) {
      pass.roots.push_back(edge);
      pass.grads.push_back(std::move(grad));
    }
  };
  for (std::size_t k = 0; k < captures_.size(); ++k) {
    add(captures_[k], std::move(captured[k]));
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    if (output_is_root_[k]) {
      add(outputs[k], output_grads[k]);
    }
  }
  return pass;
}

}  // namespace pipetransformer::pipe
