// A pipeline as Python holds it: its workers, and where its stages are. Calls
// live on their own, in the autograd graph, and keep what they need. The user's
// stages belong to Python's side, where its garbage collector sees them: they
// come with every call.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "device/pipeline_streams.h"
#include "pipe/autograd_nodes.h"
#include "pipe/dispatch.h"
#include "pipe/pipe_call.h"
#include "python/pipe/options.h"
#include "python/pipe/stages.h"
#include "python/pipe/workers.h"

namespace pipetransformer::bindings {

// The stages of one call.
struct CallStages {
  std::vector<StageFunctions> functions;
  std::vector<pipe::Tensors> parameters;  // by stage, those that require grad
};

// All functions need the GIL; they release it while the stages run.
class PipeEngine {
 public:
  // Vectors by stage. `lanes`: stages between which skip tensors go.
  // `own_streams`: see PipelineStreams. Throws std::invalid_argument for a lane
  // that leads nowhere.
  PipeEngine(
      PoolPtr pool,
      std::vector<c10::Device> devices,
      std::vector<int64_t> first_layers,
      const std::vector<std::pair<int32_t, int32_t>>& lanes,
      bool own_streams);

  // Scatter, forward, gather. Throws std::invalid_argument for an unknown word
  // in the options.
  pybind11::object forward(
      const CallStages& stages,
      const pybind11::tuple& args,
      const pybind11::dict& kwargs,
      const CallOptions& options);

  // Scatter, forward, loss and backward in one schedule; the loss, weighted by
  // rows, whose backward delivers the gradients.
  at::Tensor step(
      const CallStages& stages,
      const pybind11::tuple& args,
      const pybind11::dict& kwargs,
      const pybind11::object& targets,
      const pybind11::object& loss,
      const std::string& schedule,
      const CallOptions& options);

  // Forward of given micro-batches, each positional and keyword arguments of
  // the first layer, without gradients; one output each.
  pybind11::list
  run(const CallStages& stages,
      const std::vector<std::pair<pybind11::tuple, pybind11::dict>>&
          microbatches,
      const CallOptions& options);

  // "threads" or "serial": what "auto" means at present.
  std::string current_dispatch() const;

 private:
  struct Call;
  Call begin(
      const CallStages& stages,
      const pybind11::tuple& args,
      const pybind11::dict& kwargs,
      const CallOptions& options,
      bool linkable);
  // The targets on the last device, by micro-batch. Throws
  // std::invalid_argument when they require grad, std::runtime_error when their
  // rows give another number of micro-batches than the inputs'.
  LossFunction cut_targets(
      const pybind11::object& loss,
      const pybind11::object& targets,
      const Call& call,
      const CallOptions& options) const;
  // Throws py::value_error unless there is one stage per device.
  std::shared_ptr<PythonStages> make_stages(
      const CallStages& stages,
      std::vector<Tree> inputs,
      std::size_t num_microbatches,
      const CallOptions& options) const;
  pipe::CallSettings
  make_settings(const CallOptions& options, std::size_t num_microbatches) const;
  planner::ScheduleShape shape_of(const pipe::PipeCall& call) const;
  void run_forward(
      const std::shared_ptr<pipe::PipeCall>& call,
      const CallOptions& options);
  void observe(const pipe::PipeCall& call);

  PoolPtr pool_;
  std::vector<c10::Device> devices_;
  std::vector<int64_t> first_layers_;
  std::shared_ptr<const pipe::Lanes> lanes_;
  std::shared_ptr<device::PipelineStreams> streams_;
  std::shared_ptr<planner::ScheduleCache> schedules_;
  bool on_cpu_;
  pipe::DispatchChoice dispatch_;
};

}  // namespace pipetransformer::bindings
