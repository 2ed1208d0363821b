#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "pipe/cell_checks.h"
#include "pipe/cell_trace.h"
#include "pipe/phase.h"
#include "pipe/random.h"
#include "pipe/rows.h"
#include "planner/schedule/schedules.h"
#include "python/bindings.h"
#include "python/pipe/engine.h"
#include "python/pipe/workers.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

namespace {

bool is_of_checkpoint(const c10::SafePyObject& hook) {
  const py::gil_scoped_acquire gil;
  const py::handle function(hook.ptr(getPyInterpreter()));
  const py::object where = py::getattr(function, "__module__", py::none());
  return where.equal(py::str("torch.utils.checkpoint"));
}

// A DrawScope with Python's enter and exit; a call of its own.
class DrawScopeHandle {
 public:
  DrawScopeHandle(
      std::optional<uint64_t> seed,
      int64_t step,
      int64_t microbatch,
      int64_t layer,
      bool keyed)
      : seed_(seed),
        step_(step),
        microbatch_(microbatch),
        layer_(layer),
        keyed_(keyed) {}
  void enter() {
    const py::gil_scoped_release no_gil;  // the fallback waits for its turn
    call_seed_ = pipe::seed_of_call(seed_);
    scope_ = std::make_unique<pipe::DrawScope>(
        pipe::DrawPosition{call_seed_, step_, microbatch_}, layer_, keyed_);
  }
  void exit() {
    if (scope_) {
      scope_.reset();
      call_seed_->settle();
    }
  }

 private:
  std::optional<uint64_t> seed_;
  int64_t step_;
  int64_t microbatch_;
  int64_t layer_;
  bool keyed_;
  std::shared_ptr<pipe::CallSeed> call_seed_;
  std::unique_ptr<pipe::DrawScope> scope_;
};

void bind_workers(py::module_& m) {
  py::class_<SpareRun, std::shared_ptr<SpareRun>>(m, "SpareRun")
      .def("wait", &SpareRun::wait, py::call_guard<py::gil_scoped_release>())
      .def(
          "cancel",
          &SpareRun::cancel,
          py::call_guard<py::gil_scoped_release>());
  py::class_<pipe::WorkerPool, PoolPtr>(m, "WorkerPool")
      .def(
          py::init(&make_pool),
          py::arg("num_workers"),
          py::arg("intra_op_threads"))
      .def_property_readonly("num_workers", &pipe::WorkerPool::num_workers)
      .def("map", &map_on_pool, py::arg("fn"), py::arg("items"))
      .def("spare", &SpareRun::start, py::arg("function"), py::arg("items"))
      .def("drain", &drain_pool, py::arg("timeout_s"))
      .def(
          "cpu_seconds",
          &pipe::WorkerPool::cpu_seconds,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "shutdown",
          &pipe::WorkerPool::shutdown,
          py::call_guard<py::gil_scoped_release>());
  m.def(
      "shutdown_all_pools",
      &shutdown_all_pools,
      py::call_guard<py::gil_scoped_release>());
}

void bind_draws(py::module_& m) {
  m.def(
      "keyed_draws_work",
      &pipe::keyed_draws_work,
      py::call_guard<py::gil_scoped_release>());
  m.def("check_no_tangents", &pipe::check_no_tangents, py::arg("tensors"));
  m.def("trace_cells", &pipe::trace_cells, py::arg("most"));
  m.def("take_cells", [] {
    auto [spans, left_out] = pipe::take_cells();
    py::list cells;
    for (const pipe::CellSpan& span : spans) {
      cells.append(py::make_tuple(
          std::string(1, span.kind),
          span.stage,
          span.microbatch,
          span.begin_ns,
          span.end_ns));
    }
    return py::make_tuple(cells, left_out);
  });
  pipe::set_checkpoint_test(&is_of_checkpoint);
  m.def("set_draw_layer", &pipe::set_draw_layer, py::arg("layer"));
  py::class_<DrawScopeHandle>(m, "DrawScope")
      .def(
          py::init<std::optional<uint64_t>, int64_t, int64_t, int64_t, bool>(),
          py::arg("seed"),
          py::arg("step"),
          py::arg("microbatch"),
          py::arg("layer"),
          py::arg("keyed"))
      .def("enter", &DrawScopeHandle::enter)
      .def("exit", &DrawScopeHandle::exit);
}

void bind_options(py::module_& m) {
  py::class_<DrawSettings>(m, "DrawSettings")
      .def(
          py::init([](std::string mode,
                      std::optional<uint64_t> seed,
                      int64_t step,
                      int64_t first_microbatch) {
            return DrawSettings{std::move(mode), seed, step, first_microbatch};
          }),
          py::arg("mode"),
          py::arg("seed"),
          py::arg("step"),
          py::arg("first_microbatch"));
  py::class_<CallOptions>(m, "CallOptions")
      .def(py::init<>())
      .def_readwrite("num_microbatches", &CallOptions::num_microbatches)
      .def_readwrite("even", &CallOptions::even)
      .def_readwrite("min_rows", &CallOptions::min_rows)
      .def_readwrite("checkpoint", &CallOptions::checkpoint)
      .def_readwrite("dispatch", &CallOptions::dispatch)
      .def_readwrite("strict", &CallOptions::strict)
      .def_readwrite("spread", &CallOptions::spread)
      .def_readwrite("order_rule", &CallOptions::order_rule)
      .def_readwrite("early_recompute", &CallOptions::early_recompute)
      .def_readwrite("copy_streams", &CallOptions::copy_streams)
      .def_readwrite("record", &CallOptions::record)
      .def_readwrite("draws", &CallOptions::draws);
  py::class_<CallStages>(m, "CallStages")
      .def(
          py::init([](std::vector<StageFunctions> functions,
                      std::vector<pipe::Tensors> parameters) {
            return CallStages{std::move(functions), std::move(parameters)};
          }),
          py::arg("functions"),
          py::arg("parameters"));
}

void bind_engine(py::module_& m) {
  py::class_<PipeEngine>(m, "PipeEngine")
      .def(
          py::init<
              PoolPtr,
              std::vector<c10::Device>,
              std::vector<int64_t>,
              std::vector<std::pair<int32_t, int32_t>>,
              bool>(),
          py::arg("pool"),
          py::arg("devices"),
          py::arg("first_layers"),
          py::arg("lanes"),
          py::arg("own_streams"))
      .def(
          "forward",
          &PipeEngine::forward,
          py::arg("stages"),
          py::arg("args"),
          py::arg("kwargs"),
          py::arg("options"))
      .def(
          "step",
          &PipeEngine::step,
          py::arg("stages"),
          py::arg("args"),
          py::arg("kwargs"),
          py::arg("targets"),
          py::arg("loss"),
          py::arg("schedule"),
          py::arg("options"))
      .def(
          "run",
          &PipeEngine::run,
          py::arg("stages"),
          py::arg("microbatches"),
          py::arg("options"))
      .def("current_dispatch", &PipeEngine::current_dispatch);
}

void bind_values(py::module_& m) {
  py::class_<NoChunk>(m, "NoChunk")
      .def(
          py::init([](const py::object& value) {
            if (!THPVariable_Check(value.ptr())) {
              throw py::type_error(
                  "NoChunk only supported for tensors: expected a tensor, "
                  "got " +
                  py::str(py::type::of(value).attr("__name__"))
                      .cast<std::string>());
            }
            return NoChunk{value.cast<at::Tensor>()};
          }),
          py::arg("tensor"))
      .def_readonly("tensor", &NoChunk::tensor)
      .def(py::pickle(
          [](const NoChunk& self) { return py::make_tuple(self.tensor); },
          [](const py::tuple& state) {
            return NoChunk{state[0].cast<at::Tensor>()};
          }));
  m.def(
      "gather_one",
      [](const py::handle& value, bool strict) {
        return Tree::gather_one(value, {strict ? 1 : INT_MAX, nullptr, 0});
      },
      py::arg("value"),
      py::arg("strict"));
}

py::tuple schedule_texts(
    const std::string& name,
    int32_t num_microbatches,
    int32_t num_stages,
    int32_t num_recomputed,
    int32_t first_stage) {
  const planner::Schedule schedule = planner::make_schedule(
      name, {num_microbatches, num_stages, num_recomputed, first_stage});
  return py::make_tuple(
      planner::to_string(schedule), planner::peak_live_microbatches(schedule));
}

void bind_schedules(py::module_& m) {
  m.def(
      "schedule_text",
      &schedule_texts,
      py::arg("name"),
      py::arg("num_microbatches"),
      py::arg("num_stages"),
      py::arg("num_recomputed"),
      py::arg("first_stage"));
  m.def(
      "parse_schedule",
      [](const std::string& text) {
        const planner::Schedule schedule = planner::parse_schedule(text);
        planner::check_linked(schedule);
        py::list stages;
        for (const planner::StageOps& ops : schedule) {
          py::list operations;
          for (const planner::Op& op : ops) {
            operations.append(py::make_tuple(
                std::string(1, static_cast<char>(op.kind)),
                op.microbatch,
                op.clock));
          }
          stages.append(std::move(operations));
        }
        return stages;
      },
      py::arg("text"));
  py::class_<pipe::DispatchChoice>(m, "DispatchChoice")
      .def(py::init<bool>(), py::arg("blocking"))
      .def("observe", &pipe::DispatchChoice::observe, py::arg("shortest_ns"))
      .def("current", [](const pipe::DispatchChoice& self) {
        return self.current() == pipe::Dispatch::kSerial ? "serial" : "threads";
      });
}

}  // namespace

void bind_pipe(py::module_& m) {
  bind_workers(m);
  bind_draws(m);
  bind_options(m);
  bind_engine(m);
  bind_values(m);
  bind_schedules(m);
  m.def("is_checkpointing", [] {
    return pipe::current_phase() == pipe::Phase::kCheckpointing;
  });
  m.def("is_recomputing", [] {
    return pipe::current_phase() == pipe::Phase::kRecomputing;
  });
}

}  // namespace pipetransformer::bindings
