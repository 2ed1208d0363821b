// Calls the user's stages from C++: Python callables behind pipe::StageCalls.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <thread>
#include <tuple>
#include <vector>

#include "pipe/stage_calls.h"
#include "python/pipe/values.h"

namespace pipetransformer::bindings {

// A stage's forward(*args, **kwargs) and the same as a recomputation. Of a
// stage with skip lanes: forward(popped, *args, **kwargs) -> (output, stashed),
// a list that it empties and a tuple, with a tensor or None per lane. Third:
// the layers where calling them one after another does the same, else None.
using StageFunctions = std::
    tuple<pybind11::object, pybind11::object, std::optional<pybind11::tuple>>;

struct StageOptions {
  bool spread =
      true;  // a tuple or list becomes the arguments of the next stage
  int output_depth = INT_MAX;         // as Opening::depth
  std::vector<bool> has_lanes;        // by stage
  std::vector<int64_t> first_layers;  // by stage, for the random draws
};

// What makes a loss of the last stage's output.
struct LossFunction {
  pybind11::object function;  // None: there is none
  Tree target_tree;
  std::vector<pipe::Tensors> targets;  // by micro-batch
};

// Made with the GIL held, destroyed with it or not (the destructor takes it).
// Autograd may keep a failed backward's nodes until its thread ends: where that
// is after the interpreter, what belongs to Python is left alone.
class PythonStages final : public pipe::StageCalls {
 public:
  // `inputs`: (args, kwargs) of the first stage, taken apart, by micro-batch;
  // a single entry serves all micro-batches.
  PythonStages(
      std::vector<StageFunctions> functions,
      std::vector<Tree> inputs,
      int32_t num_microbatches,
      StageOptions options);
  ~PythonStages() override;

  // From now on the last stage gives loss(output, targets), a scalar.
  void set_loss(LossFunction loss);

  // Throws py::type_error for an output without a tensor and for a loss that is
  // no scalar tensor.
  pipe::Tensors
  call(pipe::CellId cell, pipe::Phase phase, const pipe::Tensors& inputs)
      override;
  std::shared_ptr<void> enter_backward() noexcept override;
  void poll() override;
  bool is_held(const at::Tensor& leaf) noexcept override;
  void forget_failure() noexcept override;

  // Structures of the last stage's outputs, by micro-batch. Needs the GIL.
  std::vector<Tree> take_output_trees();

 private:
  // Everything that belongs to Python.
  struct Held {
    std::vector<StageFunctions> functions;  // by stage
    std::vector<Tree> inputs;
    std::vector<Tree> trees;  // of outputs, by stage, then micro-batch
    LossFunction loss;
    pybind11::object context;  // the caller's context variables
  };
  Tree& tree(int32_t stage, int32_t microbatch) {
    return held_->trees[stage * num_microbatches_ + microbatch];
  }
  pybind11::object call_function(
      pipe::CellId cell,
      pipe::Phase phase,
      const pipe::Tensors& inputs);
  pybind11::object loss_of(pipe::CellId cell, const pybind11::object& output);

  const int32_t num_microbatches_;
  const StageOptions options_;
  const std::thread::id caller_;
  std::unique_ptr<Held> held_;
};

// Raises KeyboardInterrupt and the like in the caller. Takes the GIL.
void check_signals();

}  // namespace pipetransformer::bindings
