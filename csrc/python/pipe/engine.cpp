#include "python/pipe/engine.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <stdexcept>

#include "pipe/cell_checks.h"
#include "pipe/cell_range.h"
#include "pipe/execution.h"
#include "pipe/scatter_gather.h"
#include "pipe/step_run.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

namespace {

using Part = planner::ScheduleCache::Part;

void refuse_gradient(const at::Tensor& target, const CallOptions& options) {
  if (options.record && target.requires_grad()) {
    throw std::invalid_argument(
        "targets: expected tensors that do not require grad, got one that does "
        "(it would get no gradient); detach it, or pass it as an input");
  }
}

void refuse_whole(const char* what, const Tree& tree, std::size_t count) {
  const std::string name = count > 1 ? tree.whole_mapping() : "";
  if (!name.empty()) {
    throw py::type_error(
        std::string(what) +
        ": expected tensors in tuples, lists and dicts, of which micro-batches "
        "get their rows, got a " +
        name + " with tensors; pass dict(...) of it");
  }
}

}  // namespace

// One call between scatter and gather.
struct PipeEngine::Call {
  pipe::CallInputs inputs;
  std::vector<int64_t> input_versions;
  pipe::ChainPlan plan;
  std::shared_ptr<PythonStages> stages;
  std::shared_ptr<pipe::PipeCall> cells;
  std::size_t count = 0;
};

PipeEngine::PipeEngine(
    PoolPtr pool,
    std::vector<c10::Device> devices,
    std::vector<int64_t> first_layers,
    const std::vector<std::pair<int32_t, int32_t>>& lanes,
    bool own_streams)
    : pool_(std::move(pool)),
      devices_(std::move(devices)),
      first_layers_(std::move(first_layers)),
      streams_(
          std::make_shared<device::PipelineStreams>(devices_, own_streams)),
      schedules_(std::make_shared<planner::ScheduleCache>()),
      on_cpu_(std::all_of(
          devices_.begin(),
          devices_.end(),
          [](c10::Device device) { return device.is_cpu(); })),
      dispatch_(on_cpu_) {
  std::vector<pipe::Lane> all;
  for (const auto& [source, destination] : lanes) {
    all.push_back({source, destination});
  }
  lanes_ = std::make_shared<const pipe::Lanes>(
      pipe::Lanes::make(all, static_cast<int32_t>(devices_.size())));
}

PipeEngine::Call PipeEngine::begin(
    const CallStages& stages,
    const py::tuple& args,
    const py::dict& kwargs,
    const CallOptions& options,
    bool linkable) {
  Call call;
  std::vector<bool> whole;
  std::vector<Tree> trees;
  trees.push_back(Tree::take_apart(
      py::make_tuple(args, kwargs),
      call.inputs.tensors,
      {options.strict ? 2 : INT_MAX, &whole, 0}));
  pipe::check_no_tangents(call.inputs.tensors);
  for (const pipe::Tensors& parameters : stages.parameters) {
    pipe::check_no_tangents(parameters);
  }
  pipe::Scattered scattered = pipe::scatter(
      "inputs",
      call.inputs.tensors,
      whole,
      options.num_microbatches,
      row_split(options),
      options.min_rows,
      options.record);
  call.inputs.rows = std::move(scattered.rows);
  if (!options.strict) {
    pipe::check_shares(
        "inputs", call.inputs.rows, pipe::first_cut(call.inputs.rows));
    refuse_whole("inputs", trees.front(), scattered.microbatches.size());
  }
  call.input_versions = pipe::versions_of(call.inputs.tensors);
  call.inputs.parameters = stages.parameters;
  call.count = scattered.microbatches.size();
  call.stages = make_stages(stages, std::move(trees), call.count, options);
  pipe::CallSettings settings = make_settings(options, call.count);
  // Columns recompute one micro-batch at a time: that is the order rule.
  call.plan = pipe::plan_chain(call.inputs);
  const auto& parameters = call.plan.backward->parameters;
  bool leaves = true;
  for (std::size_t j = 0; j < parameters.size(); ++j) {
    if (!pipe::all_leaves(parameters[j])) {
      leaves = false;
      pipe::check_independent(static_cast<int32_t>(j), parameters[j]);
    }
  }
  // Columns recompute one micro-batch at a time: that is the order rule. One
  // call of autograd tells leaves apart, and not what is computed of others.
  settings.linked = linkable && options.record && on_cpu_ && leaves &&
                    options.order_rule && !pipe::CellRange::wanted() &&
                    settings.dispatch != pipe::Dispatch::kThreads;
  call.cells = std::make_shared<pipe::PipeCall>(
      std::move(settings),
      call.plan.backward,
      call.stages,
      std::move(scattered.microbatches));
  return call;
}

py::object PipeEngine::forward(
    const CallStages& stages,
    const py::tuple& args,
    const py::dict& kwargs,
    const CallOptions& options) {
  Call call = begin(stages, args, kwargs, options, /*linkable=*/true);
  run_forward(call.cells, options);
  pipe::check_leaves_unchanged(call.inputs.tensors, call.input_versions);

  const std::vector<Tree> output_trees = call.stages->take_output_trees();
  Tree::check_same(output_trees);
  pipe::Tensors tensors;
  {
    const py::gil_scoped_release no_gil;
    std::vector<pipe::Activations> outputs;
    for (std::size_t i = 0; i < call.count; ++i) {
      outputs.push_back(call.cells->take_output(static_cast<int32_t>(i)));
    }
    pipe::Gathered gathered = pipe::gather(outputs);
    if (call.cells->output_requires_grad()) {
      tensors = pipe::connect(
          {pool_, schedules_, {options.order_rule, options.early_recompute}},
          std::move(call.cells),
          call.plan,
          gathered);
    } else {
      tensors = std::move(gathered.tensors);
    }
  }
  return Tree::gather(output_trees, tensors);
}

LossFunction PipeEngine::cut_targets(
    const py::object& loss,
    const py::object& targets,
    const Call& call,
    const CallOptions& options) const {
  LossFunction loss_function{loss, {}, {}};
  pipe::Tensors target_tensors;
  std::vector<bool> whole;
  loss_function.target_tree =
      Tree::take_apart(targets, target_tensors, {INT_MAX, &whole, 0});
  for (at::Tensor& tensor : target_tensors) {
    refuse_gradient(tensor, options);
    // As inputs: pinned memory would be read after the call has returned.
    tensor = tensor.to(
        devices_.back(),
        /*non_blocking=*/!devices_.back().is_cpu() &&
            !(tensor.is_cpu() && tensor.is_pinned()));
  }
  const pipe::Scattered cut = pipe::scatter(
      "targets",
      target_tensors,
      whole,
      options.num_microbatches,
      row_split(options),
      options.min_rows,
      /*record=*/false);
  const bool any_cut =
      std::any_of(cut.rows.begin(), cut.rows.end(), [](const auto& rows) {
        return !rows.empty();
      });
  if (any_cut && cut.microbatches.size() != call.count) {
    throw std::runtime_error(
        "Found different number of chunks: expected " +
        std::to_string(call.count) +
        " micro-batches of targets, as of the "
        "inputs, got " +
        std::to_string(cut.microbatches.size()));
  }
  pipe::check_shares("targets", cut.rows, pipe::first_cut(call.inputs.rows));
  refuse_whole("targets", loss_function.target_tree, call.count);
  for (std::size_t i = 0; i < call.count; ++i) {
    loss_function.targets.emplace_back();
    for (const pipe::Activation& target : cut.microbatches[any_cut ? i : 0]) {
      loss_function.targets.back().push_back(target.value);
    }
  }
  return loss_function;
}

at::Tensor PipeEngine::step(
    const CallStages& stages,
    const py::tuple& args,
    const py::dict& kwargs,
    const py::object& targets,
    const py::object& loss,
    const std::string& schedule,
    const CallOptions& options) {
  Call call = begin(stages, args, kwargs, options, /*linkable=*/false);
  call.stages->set_loss(cut_targets(loss, targets, call, options));
  call.cells->streams().begin();  // once more: after the targets are there

  const std::vector<double> weights =
      pipe::row_weights(call.inputs.rows, call.count);
  const pipe::ChainPlan& plan = call.plan;
  const auto num_stages = static_cast<int32_t>(devices_.size());
  if (!options.record || plan.backward->first_stage == num_stages) {
    run_forward(call.cells, options);
    const py::gil_scoped_release no_gil;
    return pipe::mean_loss(*call.cells, weights);
  }
  const py::gil_scoped_release no_gil;
  pipe::StepRun run(call.cells, plan.backward, weights);
  planner::ScheduleShape shape = shape_of(*call.cells);
  shape.first_stage = plan.backward->first_stage;
  run.run(
      *pool_,
      schedules_->get(
          Part::kWhole,
          schedule,
          shape,
          {options.order_rule, options.early_recompute}));
  observe(*call.cells);
  pipe::check_leaves_unchanged(call.inputs.tensors, call.input_versions);
  const at::Tensor mean = pipe::mean_loss(*call.cells, weights);
  bool carries = false;
  for (std::size_t i = 0; i < call.count; ++i) {
    carries =
        carries || call.cells->output(static_cast<int32_t>(i))[0].requires_grad;
  }
  return carries ? pipe::connect_step(mean, run, plan) : mean;
}

py::list PipeEngine::run(
    const CallStages& stages,
    const std::vector<std::pair<py::tuple, py::dict>>& microbatches,
    const CallOptions& options) {
  std::vector<Tree> input_trees;
  std::vector<pipe::Activations> inputs;
  for (const auto& [args, kwargs] : microbatches) {
    pipe::Tensors tensors;
    input_trees.push_back(
        Tree::take_apart(py::make_tuple(args, kwargs), tensors));
    pipe::check_no_tangents(tensors);
    inputs.emplace_back();
    for (at::Tensor& tensor : tensors) {
      inputs.back().push_back({std::move(tensor), false, 0});
    }
  }
  const std::size_t count = microbatches.size();
  const auto python_stages =
      make_stages(stages, std::move(input_trees), count, options);
  const pipe::ChainPlan plan = pipe::plan_chain({{}, {}, stages.parameters});
  const auto call = std::make_shared<pipe::PipeCall>(
      make_settings(options, count),
      plan.backward,
      python_stages,
      std::move(inputs));
  run_forward(call, options);

  py::list results;
  const std::vector<Tree> output_trees = python_stages->take_output_trees();
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

std::string PipeEngine::current_dispatch() const {
  return dispatch_.current() == pipe::Dispatch::kSerial ? "serial" : "threads";
}

std::shared_ptr<PythonStages> PipeEngine::make_stages(
    const CallStages& stages,
    std::vector<Tree> inputs,
    std::size_t num_microbatches,
    const CallOptions& options) const {
  if (stages.functions.size() != devices_.size()) {
    throw py::value_error(
        "partitions: expected " + std::to_string(devices_.size()) +
        " stages as when the pipe was first called, got " +
        std::to_string(stages.functions.size()));
  }
  StageOptions stage_options;
  stage_options.spread = options.spread;
  stage_options.output_depth = options.strict ? 1 : INT_MAX;
  stage_options.first_layers = first_layers_;
  for (std::size_t j = 0; j < devices_.size(); ++j) {
    stage_options.has_lanes.push_back(
        !lanes_->popped[j].empty() || !lanes_->stashed[j].empty());
  }
  return std::make_shared<PythonStages>(
      stages.functions,
      std::move(inputs),
      static_cast<int32_t>(num_microbatches),
      std::move(stage_options));
}

pipe::CallSettings PipeEngine::make_settings(
    const CallOptions& options,
    std::size_t num_microbatches) const {
  pipe::CallSettings settings;
  settings.num_stages = static_cast<int32_t>(devices_.size());
  settings.num_microbatches = static_cast<int32_t>(num_microbatches);
  settings.num_checkpointed = count_checkpointed(options, num_microbatches);
  settings.record = options.record;
  settings.draw_mode = draw_mode(options);
  settings.draws = {
      settings.draw_mode == pipe::DrawMode::kGlobal
          ? nullptr
          : pipe::seed_of_call(options.draws.seed),
      options.draws.step,
      options.draws.first_microbatch};
  settings.first_layers = first_layers_;
  settings.devices = devices_;
  settings.lanes = lanes_;
  settings.streams = streams_;
  streams_->use_copy_streams(options.copy_streams);
  settings.timed = options.dispatch == "auto";
  settings.dispatch = dispatch_of(options, dispatch_.current());
  if (on_cpu_ && settings.dispatch == pipe::Dispatch::kSerial) {
    settings.dispatch = pipe::Dispatch::kHere;
  }
  return settings;
}

planner::ScheduleShape PipeEngine::shape_of(const pipe::PipeCall& call) const {
  const pipe::CallSettings& settings = call.settings();
  return {
      settings.num_microbatches,
      settings.num_stages,
      settings.num_checkpointed,
      0};
}

void PipeEngine::run_forward(
    const std::shared_ptr<pipe::PipeCall>& call,
    const CallOptions& options) {
  const py::gil_scoped_release no_gil;
  const auto run = pipe::Execution::start(
      *pool_,
      schedules_->get(
          Part::kForward,
          "",
          shape_of(*call),
          {options.order_rule, options.early_recompute}),
      call->settings().dispatch,
      {.run =
           [call](int32_t stage, const pipe::Op& op) {
             call->forward_cell({stage, op.microbatch});
           },
       .enter =
           [call] {
             return std::make_shared<pipe::CallerScope>(call->context());
           }});
  try {
    run->wait_all([&call] { call->stages().poll(); });
  } catch (...) {  // what is queued on streams still runs
    call->finish();
    throw;
  }
  call->finish();
  observe(*call);
}

void PipeEngine::observe(const pipe::PipeCall& call) {
  if (call.settings().timed) {
    const py::gil_scoped_acquire gil;  // calls from two threads
    dispatch_.observe(call.shortest_calls_ns());
  }
}

}  // namespace pipetransformer::bindings
