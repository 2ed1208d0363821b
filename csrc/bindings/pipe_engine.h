// A pipeline as Python holds it: its workers, and where its stages are. Calls
// live on their own, in the autograd graph, and keep what they need. The user's
// stages belong to Python's side, where its garbage collector sees them: they
// come with every call.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/pipe_stages.h"
#include "bindings/pipe_workers.h"
#include "device/pipeline_streams.h"
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
      std::vector<c10::Device> devices,
      std::vector<int64_t> first_layers,
      device::PipelineStreams::Options streams);

  // Scatter, forward, gather. `stages`: one per device. `parameters`: by stage,
  // those that require grad. `even`: micro-batch sizes at most one row apart,
  // else as Tensor.chunk. `checkpoint`: "never", "except_last" (existing
  // micro-batch) or "always".
  pybind11::object forward(
      const std::vector<StageFunctions>& stages,
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
  run(const std::vector<StageFunctions>& stages,
      const std::vector<std::pair<pybind11::tuple, pybind11::dict>>&
          microbatches,
      const DrawSettings& draws);

 private:
  // Throws py::value_error unless there is one stage per device.
  std::shared_ptr<PythonStages> make_stages(
      const std::vector<StageFunctions>& functions,
      std::vector<Tree> inputs,
      std::size_t num_microbatches) const;
  pipe::CallSettings
  make_settings(const DrawSettings& draws, std::size_t num_microbatches) const;
  void run_forward(const std::shared_ptr<pipe::PipeCall>& call);

  PoolPtr pool_;
  std::vector<c10::Device> devices_;
  std::vector<int64_t> first_layers_;
  std::shared_ptr<device::PipelineStreams> streams_;
};

}  // namespace pipetransformer::bindings
