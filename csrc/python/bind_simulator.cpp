// Simulator: costs of a step in, times out; and the replayer alone.
#include <pybind11/stl.h>

#include "planner/costs/step_costs.h"
#include "planner/schedule/schedule.h"
#include "python/bindings.h"
#include "simulator/replay.h"
#include "simulator/step.h"

namespace pipetransformer::bindings {

namespace py = pybind11;
using namespace pipetransformer::simulator;

namespace {

void bind_costs(py::module_& m) {
  using namespace planner;
  py::enum_<ScheduleKind>(m, "PlannerScheduleKind")
      .value("GPIPE", ScheduleKind::kGPipe)
      .value("ONE_F_ONE_B", ScheduleKind::kOneFOneB)
      .value("ZB_H1", ScheduleKind::kZbH1);
  py::enum_<PrefixPlacement>(m, "PlannerPrefixPlacement")
      .value("NONE", PrefixPlacement::kNone)
      .value("REPLICATED", PrefixPlacement::kReplicated)
      .value("PIPELINED", PrefixPlacement::kPipelined);
  py::class_<StageCosts>(m, "PlannerStageCosts")
      .def(py::init<>())
      .def_readwrite("forward_ns", &StageCosts::forward_ns)
      .def_readwrite("recompute_ns", &StageCosts::recompute_ns)
      .def_readwrite("input_grad_ns", &StageCosts::input_grad_ns)
      .def_readwrite("weight_grad_ns", &StageCosts::weight_grad_ns)
      .def_readwrite("forward_copy_ns", &StageCosts::forward_copy_ns)
      .def_readwrite("backward_copy_ns", &StageCosts::backward_copy_ns)
      .def_readwrite("has_backward", &StageCosts::has_backward)
      .def_readwrite("all_reduce_ns", &StageCosts::all_reduce_ns)
      .def_readwrite(
          "network_all_reduce_ns", &StageCosts::network_all_reduce_ns)
      .def_readwrite("state_bytes", &StageCosts::state_bytes)
      .def_readwrite("kept_bytes", &StageCosts::kept_bytes)
      .def_readwrite("recomputed_bytes", &StageCosts::recomputed_bytes)
      .def_readwrite(
          "kept_for_weights_bytes", &StageCosts::kept_for_weights_bytes);
  py::class_<StepCosts>(m, "PlannerStepCosts")
      .def(py::init<>())
      .def_readwrite("schedule", &StepCosts::schedule)
      .def_readwrite("num_microbatches", &StepCosts::num_microbatches)
      .def_readwrite("num_recomputed", &StepCosts::num_recomputed)
      .def_readwrite("stages", &StepCosts::stages)
      .def_readwrite("prefix_placement", &StepCosts::prefix_placement)
      .def_readwrite("prefix_ns", &StepCosts::prefix_ns)
      .def_readwrite("prefix_copy_ns", &StepCosts::prefix_copy_ns)
      .def_readwrite("cache_read_ns", &StepCosts::cache_read_ns);
}

void bind_options(py::module_& m) {
  py::enum_<PrefixMode>(m, "SimulatorPrefixMode")
      .value("BARRIER", PrefixMode::kBarrier)
      .value("SERIAL", PrefixMode::kSerial)
      .value("FILLED", PrefixMode::kFilled);
  py::class_<StepOptions>(m, "SimulatorStepOptions")
      .def(py::init<>())
      .def_readwrite("prefix", &StepOptions::prefix)
      .def_readwrite("at_most_one_ahead", &StepOptions::at_most_one_ahead)
      .def_readwrite("optimizer_ns", &StepOptions::optimizer_ns)
      .def_readwrite("cache_write_ns", &StepOptions::cache_write_ns)
      .def_readwrite("keep_timeline", &StepOptions::keep_timeline);
}

void bind_results(py::module_& m) {
  py::enum_<ResourceKind>(m, "SimulatorResource")
      .value("COMPUTE", ResourceKind::kCompute)
      .value("COPY_ENGINE", ResourceKind::kCopyEngine)
      .value("DEVICE_LINK", ResourceKind::kDeviceLink)
      .value("NETWORK", ResourceKind::kNetwork)
      .value("CACHE", ResourceKind::kCache);
  py::class_<Event>(m, "SimulatorEvent")
      .def_property_readonly(
          "kind", [](const Event& e) { return std::string(1, char(e.kind)); })
      .def_readonly("resource", &Event::resource)
      .def_readonly("replica", &Event::replica)
      .def_readonly("stage", &Event::stage)
      .def_readonly("microbatch", &Event::microbatch)
      .def_property_readonly(
          "direction",
          [](const Event& e) {
            return e.direction == Direction::kNone
                       ? std::string()
                       : std::string(1, char(e.direction));
          })
      .def_readonly("begin_ns", &Event::begin_ns)
      .def_readonly("end_ns", &Event::end_ns);
  py::class_<PipelineResult>(m, "SimulatorPipelineResult")
      .def_readonly("begin_ns", &PipelineResult::begin_ns)
      .def_readonly("end_ns", &PipelineResult::end_ns)
      .def_readonly("stage_busy_ns", &PipelineResult::stage_busy_ns)
      .def_readonly("peak_bytes", &PipelineResult::peak_bytes)
      .def_readonly("bubble_fraction", &PipelineResult::bubble_fraction);
  py::class_<StepResult>(m, "SimulatorStepResult")
      .def_readonly("step_ns", &StepResult::step_ns)
      .def_readonly("exposed_all_reduce_ns", &StepResult::exposed_all_reduce_ns)
      .def_readonly("pipelines", &StepResult::pipelines)
      .def_readonly("timeline", &StepResult::timeline);
}

StepResult step(
    const planner::StepCosts& costs,
    const StepOptions& options,
    const std::vector<Permille>& replicas,
    const std::optional<std::string>& lists) {
  if (!lists) {
    return simulate_replicas(costs, replicas, options);
  }
  return simulate_lists(
      costs, planner::parse_schedule(*lists), replicas, options);
}

// (resource, duration) and (earlier, task) as plain pairs: begin and end of
// each task, and of each grain with its resource.
py::tuple replay_plain(
    int32_t num_resources,
    const std::vector<std::pair<int32_t, int64_t>>& tasks,
    const std::vector<std::pair<int32_t, int32_t>>& waits,
    int64_t fill_ns,
    int64_t grain_ns) {
  TaskGraph graph;
  FillWork fill{fill_ns, grain_ns, {}};
  for (int32_t i = 0; i < num_resources; ++i) {
    fill.resources.push_back(graph.add_resource(ResourceKind::kCompute));
  }
  for (const auto& [resource, duration_ns] : tasks) {
    Task task;
    task.microbatch = static_cast<int32_t>(graph.tasks().size());
    task.stage = resource;
    task.resource = resource;
    task.duration_ns = duration_ns;
    graph.add(task);
  }
  for (const auto& [earlier, task] : waits) {
    graph.wait(task, earlier);
  }
  const Replay times = replay(graph, fill);
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (const Span& span : times.spans) {
    spans.emplace_back(span.begin_ns, span.end_ns);
  }
  std::vector<std::tuple<int32_t, int64_t, int64_t>> grains;
  for (const FillSpan& span : times.fills) {
    grains.emplace_back(span.resource, span.begin_ns, span.end_ns);
  }
  return py::make_tuple(spans, grains, times.fill_left_ns);
}

}  // namespace

void bind_simulator(py::module_& m) {
  bind_costs(m);
  bind_options(m);
  bind_results(m);
  m.def(
      "simulator_step",
      &step,
      py::arg("costs"),
      py::arg("options"),
      py::arg("replicas") = std::vector<Permille>(1),
      py::arg("lists") = py::none(),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "simulator_replay",
      &replay_plain,
      py::arg("num_resources"),
      py::arg("tasks"),
      py::arg("waits"),
      py::arg("fill_ns") = 0,
      py::arg("grain_ns") = 1);
}

}  // namespace pipetransformer::bindings
