// What a stage input that carries gradient has as its history.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace pipetransformer::pipe {

// Note [Border nodes]
// A stage input that carries gradient is not a leaf: layers may change it in
// place, as in the plain model. Its history is a border node, and the gradient
// is picked up where it would enter that node, which is then not run. Borders
// of linked cells lead on to the outputs of the cells that made the inputs: a
// backward that asks for no input's gradient there runs through them.
struct BorderNode : torch::autograd::Node {
  torch::autograd::variable_list
  apply(torch::autograd::variable_list&& grads) override {
    return std::move(grads);
  }
  std::string name() const override {
    return "PipeBorder";
  }
};

// Where a border leads that leads to no other cell: autograd takes a node
// without a successor for a leaf, and hooks of layers that ask whether it will
// run (torch.autograd.graph.register_multi_grad_hook) would fail. Runs only for
// a backward that a layer begins by itself, whose gradient ends here.
struct EndNode : torch::autograd::Node {
  torch::autograd::variable_list
  apply(torch::autograd::variable_list&& /*grads*/) override {
    throw std::runtime_error(
        "pipe: expected layers that call backward() to detach their inputs "
        "before, got a gradient that would end at the stage's border");
  }
  std::string name() const override {
    return "PipeEnd";
  }
};

}  // namespace pipetransformer::pipe
