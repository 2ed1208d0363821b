// Calls the user's stages from C++: Python callables behind pipe::StageCalls.
#pragma once

#include <pybind11/pybind11.h>

#include <tuple>
#include <vector>

#include "bindings/pipe_values.h"
#include "pipe/stage_calls.h"

namespace pipetransformer::bindings {

// A stage's forward(*args, **kwargs), a forward that keeps nothing for
// backward, and a forward again from the kept inputs.
using StageFunctions =
    std::tuple<pybind11::object, pybind11::object, pybind11::object>;

// Made with the GIL held, destroyed with it or not (the destructor takes it).
class PythonStages final : public pipe::StageCalls {
 public:
  // `inputs`: (args, kwargs) of the first stage, taken apart, by micro-batch;
  // a single entry serves all micro-batches.
  PythonStages(
      std::vector<StageFunctions> functions,
      std::vector<Tree> inputs,
      int32_t num_microbatches);
  ~PythonStages() override;

  pipe::Tensors call(
      pipe::CellId cell,
      pipe::Phase phase,
      bool record,
      const pipe::Tensors& inputs) override;
  void poll() override;
  void forget_failure() noexcept override;

  // Structures of the last stage's outputs, by micro-batch. Needs the GIL.
  std::vector<Tree> take_output_trees();

 private:
  // Structure at the border below stage j of micro-batch i; row 0 the inputs.
  Tree& tree(int32_t border, int32_t microbatch) {
    return trees_[border * num_microbatches_ + microbatch];
  }

  std::vector<StageFunctions> functions_;  // by stage
  const int32_t num_microbatches_;
  std::vector<Tree> inputs_;
  std::vector<Tree> trees_;
};

// Raises KeyboardInterrupt and the like in the caller. Takes the GIL.
void check_signals();

}  // namespace pipetransformer::bindings
