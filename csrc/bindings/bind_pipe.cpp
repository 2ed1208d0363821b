#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "bindings/bindings.h"
#include "bindings/pipe_engine.h"
#include "bindings/pipe_workers.h"
#include "pipe/phase.h"
#include "pipe/random.h"
#include "pipe/rows.h"
#include "pipe/schedule_order.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

namespace {

// A DrawScope with Python's enter and exit.
class DrawScopeHandle {
 public:
  DrawScopeHandle(pipe::DrawPosition position, int64_t layer, bool keyed)
      : position_(position), layer_(layer), keyed_(keyed) {}
  void enter() {
    const py::gil_scoped_release no_gil;  // the fallback waits for its turn
    scope_ = std::make_unique<pipe::DrawScope>(position_, layer_, keyed_);
  }
  void exit() {
    scope_.reset();
  }

 private:
  pipe::DrawPosition position_;
  int64_t layer_;
  bool keyed_;
  std::unique_ptr<pipe::DrawScope> scope_;
};

void bind_workers(py::module_& m) {
  py::class_<pipe::WorkerPool, PoolPtr>(m, "WorkerPool")
      .def(
          py::init(&make_pool),
          py::arg("num_workers"),
          py::arg("intra_op_threads"))
      .def_property_readonly("num_workers", &pipe::WorkerPool::num_workers)
      .def("map", &map_on_pool, py::arg("fn"), py::arg("items"))
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
  m.def("keyed_draws_work", &pipe::keyed_draws_work);
  m.def("set_draw_layer", &pipe::set_draw_layer, py::arg("layer"));
  m.def("draw_seed", &pipe::draw_seed);
  py::class_<DrawScopeHandle>(m, "DrawScope")
      .def(
          py::init([](uint64_t seed,
                      int64_t step,
                      int64_t microbatch,
                      int64_t layer,
                      bool keyed) {
            return DrawScopeHandle({seed, step, microbatch}, layer, keyed);
          }),
          py::arg("seed"),
          py::arg("step"),
          py::arg("microbatch"),
          py::arg("layer"),
          py::arg("keyed"))
      .def("enter", &DrawScopeHandle::enter)
      .def("exit", &DrawScopeHandle::exit);
}

void bind_engine(py::module_& m) {
  py::class_<DrawSettings>(m, "DrawSettings")
      .def(
          py::init([](bool keyed,
                      uint64_t seed,
                      int64_t step,
                      int64_t first_microbatch) {
            return DrawSettings{keyed, seed, step, first_microbatch};
          }),
          py::arg("keyed"),
          py::arg("seed"),
          py::arg("step"),
          py::arg("first_microbatch"));
  py::class_<PipeEngine>(m, "PipeEngine")
      .def(
          py::init([](PoolPtr pool,
                      std::vector<c10::Device> devices,
                      std::vector<int64_t> first_layers,
                      bool own_streams,
                      bool copy_streams) {
            return PipeEngine(
                std::move(pool),
                std::move(devices),
                std::move(first_layers),
                {own_streams, copy_streams});
          }),
          py::arg("pool"),
          py::arg("devices"),
          py::arg("first_layers"),
          py::arg("own_streams"),
          py::arg("copy_streams"))
      .def(
          "forward",
          &PipeEngine::forward,
          py::arg("stages"),
          py::arg("args"),
          py::arg("kwargs"),
          py::arg("parameters"),
          py::arg("num_microbatches"),
          py::arg("even"),
          py::arg("checkpoint"),
          py::arg("draws"))
      .def(
          "run",
          &PipeEngine::run,
          py::arg("stages"),
          py::arg("microbatches"),
          py::arg("draws"));
}

}  // namespace

void bind_pipe(py::module_& m) {
  bind_workers(m);
  bind_draws(m);
  bind_engine(m);
  m.def("is_checkpointing", [] {
    return pipe::current_phase() == pipe::Phase::kCheckpointing;
  });
  m.def("is_recomputing", [] {
    return pipe::current_phase() == pipe::Phase::kRecomputing;
  });
  m.def("gather_one", &Tree::gather_one, py::arg("value"));
  m.def(
      "split_rows",
      [](int64_t num_rows, int64_t num_microbatches, bool even) {
        return pipe::split_rows(
            num_rows,
            num_microbatches,
            even ? pipe::RowSplit::kEven : pipe::RowSplit::kChunk);
      },
      py::arg("num_rows"),
      py::arg("num_microbatches"),
      py::arg("even"));
  m.def(
      "gpipe_order_text",
      [](int32_t num_microbatches, int32_t num_stages, int32_t num_recomputed) {
        const auto forward = pipe::gpipe_forward(num_microbatches, num_stages);
        const auto backward = pipe::gpipe_backward(
            num_microbatches, num_stages, num_recomputed, 0);
        pipe::check_order(forward);
        pipe::check_order(backward);
        return py::make_tuple(
            pipe::to_string(forward), pipe::to_string(backward));
      },
      py::arg("num_microbatches"),
      py::arg("num_stages"),
      py::arg("num_recomputed"));
}

}  // namespace pipetransformer::bindings
