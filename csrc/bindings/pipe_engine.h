// A pipeline as Python holds it: the user's stages, their devices, the workers.
// Its calls live on their own, in the autograd graph, and keep what they need.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/pipe_stages.h"
#include "bindings/pipe_workers.h"
#include "pipe/pipe_call.h"

namespace pipetransformer::bindings {

// Keys of the random draws of one call.
struct DrawSettings {
  bool keyed = true;
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t first_microbatch = 0;
};

// All functions need the GIL; they release it while the stages run.
class PipeEngine {
 public:
  // Vectors by stage; one worker per stage at least.
  PipeEngine(
      PoolPtr pool,
      StageFunctions functions,
      std::vector<c10::Device> devices,
      std::vector<int64_t> first_layers);

  // Scatter, forward, gather. `parameters`: by stage, those that require grad.
  // `even`: micro-batch sizes at most one row apart, else as Tensor.chunk.
  // `checkpoint`: "never", "except_last" (existing micro-batch) or "always".
  pybind11::object forward(
      const pybind11::tuple& args,
      const pybind11::dict& kwargs,
      std::vector<pipe::Tensors> parameters,
      int64_t num_microbatches,
      bool even,
      const std::string& checkpoint,
      const DrawSettings& draws);

  // Forward of given micro-batches, each positional and keyword arguments of
  // the first layer, without gradients; one output each.
  pybind11::list
  run(const std::vector<std::pair<pybind11::tuple, pybind11::dict>>&
          microbatches,
      const DrawSettings& draws);

 private:
  pipe::CallSettings
  make_settings(const DrawSettings& draws, std::size_t num_microbatches) const;
  void run_forward(const std::shared_ptr<pipe::PipeCall>& call);

  PoolPtr pool_;
  std::shared_ptr<const StageFunctions> functions_;
  std::vector<c10::Device> devices_;
  std::vector<int64_t> first_layers_;
};

}  // namespace pipetransformer::bindings
