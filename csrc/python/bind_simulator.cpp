// Simulator: costs of a step in, times out; and the replayer alone.
#include <pybind11/stl.h>

#include "planner/costs/step_costs.h"
#include "python/bindings.h"
#include "simulator/replay.h"
#include "simulator/step.h"

namespace pipetransformer::bindings {

namespace py = pybind11;
using namespace pipetransformer::simulator;

namespace {

void bind_step_options(py::module_& m) {
  py::enum_<PrefixMode>(m, "PrefixMode")
      .value("BARRIER", PrefixMode::kBarrier)
      .value("SERIAL", PrefixMode::kSerial)
      .value("FILLED", PrefixMode::kFilled);
  py::class_<StepOptions>(m, "StepOptions")
      .def(py::init<>())
      .def_readwrite("prefix", &StepOptions::prefix)
      .def_readwrite("at_most_one_ahead", &StepOptions::at_most_one_ahead)
      .def_readwrite("keep_timeline", &StepOptions::keep_timeline);
}

void bind_results(py::module_& m) {
  py::enum_<ResourceKind>(m, "Resource")
      .value("COMPUTE", ResourceKind::kCompute)
      .value("COPY_ENGINE", ResourceKind::kCopyEngine)
      .value("DEVICE_LINK", ResourceKind::kDeviceLink)
      .value("NETWORK", ResourceKind::kNetwork)
      .value("CACHE", ResourceKind::kCache);
  py::class_<Event>(m, "Event")
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
  py::class_<PipelineResult>(m, "PipelineResult")
      .def_readonly("begin_ns", &PipelineResult::begin_ns)
      .def_readonly("end_ns", &PipelineResult::end_ns)
      .def_readonly("stage_busy_ns", &PipelineResult::stage_busy_ns)
      .def_readonly("peak_bytes", &PipelineResult::peak_bytes)
      .def_readonly("bubble_fraction", &PipelineResult::bubble_fraction);
  py::class_<StepResult>(m, "StepResult")
      .def_readonly("step_ns", &StepResult::step_ns)
      .def_readonly("last_step_ns", &StepResult::last_step_ns)
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
  bind_step_options(m);
  bind_results(m);
  m.def(
      "step",
      &step,
      py::arg("costs"),
      py::arg("options"),
      py::arg("replicas") = std::vector<Permille>(1),
      py::arg("lists") = py::none(),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "replay",
      &replay_plain,
      py::arg("num_resources"),
      py::arg("tasks"),
      py::arg("waits"),
      py::arg("fill_ns") = 0,
      py::arg("grain_ns") = 1);
}

}  // namespace pipetransformer::bindings
