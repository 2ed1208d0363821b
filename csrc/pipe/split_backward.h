// Backward of one cell's graph in two passes: first the gradients of its
// inputs, later those of its parameters, without computing anything twice.
// See Note [Two passes over one graph] in split_backward.cpp.
//
// Works for the graph of any module. Touches nothing but the cell's own nodes;
// used by one thread.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <optional>
#include <vector>

#include "pipe/node_ptr.h"
#include "pipe/stage_calls.h"

namespace pipetransformer::pipe {

struct GraphEnds {
  torch::autograd::edge_list outputs;  // where gradients enter
  torch::autograd::edge_list inputs;
  torch::autograd::edge_list parameters;
};

// Where the second pass starts, and with which gradients.
struct WeightPass {
  torch::autograd::edge_list roots;
  Tensors grads;
};

class BackwardSplit {
 public:
  // Empty where the graph cannot be split: a node that both passes would run
  // has hooks, or runs code that is not torch's own (a custom Function, a
  // compiled graph) and may count on running once.
  static std::optional<BackwardSplit> make(const GraphEnds& ends);

  // What the first pass has to capture besides the gradients of the inputs.
  const torch::autograd::edge_list& captures() const noexcept {
    return captures_;
  }

  // After the first pass, which must have kept the graph: cuts the paths to the
  // inputs, so that the second pass computes the parameters' gradients alone.
  // `captured`: gradients at captures(); `output_grads`: those that entered at
  // `outputs`. Undefined ones are left out.
  WeightPass finish(
      Tensors captured,
      const torch::autograd::edge_list& outputs,
      const Tensors& output_grads);

 private:
  struct Branching {
    NodePtr node;
    std::vector<std::size_t> to_inputs;  // its edges on a path to an input
  };
  std::vector<Branching> branching_;
  torch::autograd::edge_list captures_;
  std::vector<bool> output_is_root_;  // leads to parameters, not to inputs
};

}  // namespace pipetransformer::pipe
