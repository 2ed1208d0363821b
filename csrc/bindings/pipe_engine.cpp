#include "bindings/pipe_engine.h"

#include <c10/core/GradMode.h>

#include "pipe/autograd_nodes.h"
#include "pipe/execution.h"
#include "pipe/scatter_gather.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

namespace {

int32_t count_checkpointed(const std::string& mode, std::size_t count) {
  const auto num_microbatches = static_cast<int32_t>(count);
  if (mode == "always") {
    return num_microbatches;
  }
  return mode == "except_last" ? num_microbatches - 1 : 0;
}

}  // namespace

PipeEngine::PipeEngine(
    PoolPtr pool,
    std::vector<c10::Device> devices,
    std::vector<int64_t> first_layers,
    device::PipelineStreams::Options streams)
    : pool_(std::move(pool)),
      devices_(std::move(devices)),
      first_layers_(std::move(first_layers)),
      streams_(std::make_shared<device::PipelineStreams>(devices_, streams)) {}

py::object PipeEngine::forward(
    const std::vector<StageFunctions>& functions,
    const py::tuple& args,
    const py::dict& kwargs,
    std::vector<pipe::Tensors> parameters,
    int64_t num_microbatches,
    bool even,
    const std::string& checkpoint,
    const DrawSettings& draws) {
  pipe::CallInputs inputs;
  std::vector<Tree> input_trees;
  input_trees.push_back(
      Tree::take_apart(py::make_tuple(args, kwargs), inputs.tensors));
  pipe::Scattered scattered = pipe::scatter(
      inputs.tensors,
      num_microbatches,
      even ? pipe::RowSplit::kEven : pipe::RowSplit::kChunk,
      c10::GradMode::is_enabled());
  inputs.rows = std::move(scattered.rows);
  inputs.parameters = std::move(parameters);
  const std::size_t count = scattered.microbatches.size();
  pipe::CallSettings settings = make_settings(draws, count);
  settings.num_checkpointed = count_checkpointed(checkpoint, count);
  settings.record = c10::GradMode::is_enabled();
  const auto stages = make_stages(functions, std::move(input_trees), count);
  auto call = std::make_shared<pipe::PipeCall>(
      std::move(settings), stages, std::move(scattered.microbatches));
  run_forward(call);

  const std::vector<Tree> output_trees = stages->take_output_trees();
  Tree::check_same(output_trees);
  pipe::Tensors tensors;
  {
    const py::gil_scoped_release no_gil;
    std::vector<pipe::Activations> outputs;
    for (std::size_t i = 0; i < count; ++i) {
      outputs.push_back(call->take_output(static_cast<int32_t>(i)));
    }
    pipe::Gathered gathered = pipe::gather(outputs);
    tensors = call->output_requires_grad()
                  ? pipe::connect(pool_, std::move(call), inputs, gathered)
                  : std::move(gathered.tensors);
  }
  return Tree::gather(output_trees, tensors);
}

py::list PipeEngine::run(
    const std::vector<StageFunctions>& functions,
    const std::vector<std::pair<py::tuple, py::dict>>& microbatches,
    const DrawSettings& draws) {
  std::vector<Tree> input_trees;
  std::vector<pipe::Activations> inputs;
  for (const auto& [args, kwargs] : microbatches) {
    pipe::Tensors tensors;
    input_trees.push_back(
        Tree::take_apart(py::make_tuple(args, kwargs), tensors));
    inputs.emplace_back();
    for (at::Tensor& tensor : tensors) {
      inputs.back().push_back({std::move(tensor), false});
    }
  }
  const std::size_t count = microbatches.size();
  const auto stages = make_stages(functions, std::move(input_trees), count);
  const auto call = std::make_shared<pipe::PipeCall>(
      make_settings(draws, count), stages, std::move(inputs));
  run_forward(call);

  py::list results;
  const std::vector<Tree> output_trees = stages->take_output_trees();
  for (std::size_t i = 0; i < count; ++i) {
    pipe::Tensors tensors;
    for (pipe::Activation& output :
         call->take_output(static_cast<int32_t>(i))) {
      tensors.push_back(std::move(output.value));
    }
    std::size_t next = 0;
    results.append(output_trees[i].put_together(tensors, next));
  }
  return results;
}

std::shared_ptr<PythonStages> PipeEngine::make_stages(
    const std::vector<StageFunctions>& functions,
    std::vector<Tree> inputs,
    std::size_t num_microbatches) const {
  if (functions.size() != devices_.size()) {
    throw py::value_error(
        "partitions: expected " + std::to_string(devices_.size()) +
        " stages as when the pipe was first called, got " +
        std::to_string(functions.size()));
  }
  return std::make_shared<PythonStages>(
      functions, std::move(inputs), static_cast<int32_t>(num_microbatches));
}

pipe::CallSettings PipeEngine::make_settings(
    const DrawSettings& draws,
    std::size_t num_microbatches) const {
  pipe::CallSettings settings;
  settings.num_stages = static_cast<int32_t>(devices_.size());
  settings.num_microbatches = static_cast<int32_t>(num_microbatches);
  settings.keyed_draws = draws.keyed;
  settings.draws = {draws.seed, draws.step, draws.first_microbatch};
  settings.first_layers = first_layers_;
  settings.devices = devices_;
  settings.streams = streams_;
  return settings;
}

void PipeEngine::run_forward(const std::shared_ptr<pipe::PipeCall>& call) {
  const py::gil_scoped_release no_gil;
  const pipe::CallSettings& settings = call->settings();
  const auto run = pipe::Execution::start(
      *pool_,
      pipe::gpipe_forward(settings.num_microbatches, settings.num_stages),
      [call](int32_t stage, const pipe::Op& op) {
        call->forward_cell({stage, op.microbatch});
      });
  try {
    run->wait_all([&call] { call->stages().poll(); });
  } catch (...) {  // what has been queued still runs
    call->streams().join();
    throw;
  }
  call->streams().join();
}

}  // namespace pipetransformer::bindings
