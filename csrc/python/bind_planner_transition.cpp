// Planner, change of plan: what moves, how long it takes, whether it pays.
#include <pybind11/stl.h>

#include "planner/transition/moves.h"
#include "planner/transition/pause.h"
#include "planner/transition/transition.h"
#include "python/bindings.h"

namespace pipetransformer::bindings {

namespace py = pybind11;
using namespace pipetransformer::planner;

namespace {

void bind_moves(py::module_& m) {
  py::enum_<TransitionKind>(m, "TransitionKind")
      .value("NONE", TransitionKind::kNone)
      .value("BOUNDARY", TransitionKind::kBoundary)
      .value("CUTS", TransitionKind::kCuts)
      .value("SHAPE", TransitionKind::kShape);
  py::class_<Placement>(m, "Placement")
      .def(
          py::init<Shape, Cuts, std::vector<int64_t>>(),
          py::arg("shape"),
          py::arg("cuts"),
          py::arg("state_bytes"));
  py::class_<Crowded>(m, "Crowded")
      .def_readonly("node", &Crowded::node)
      .def_readonly("device", &Crowded::device)
      .def_readonly("old_bytes", &Crowded::old_bytes)
      .def_readonly("new_bytes", &Crowded::new_bytes);
  py::class_<Moves>(m, "Moves")
      .def_readonly("device_bytes", &Moves::device_bytes)
      .def_readonly("replica_bytes", &Moves::replica_bytes)
      .def_readonly("across_nodes", &Moves::across_nodes)
      .def_readonly("crowded", &Moves::crowded);
  m.def(
      "transition_kind",
      &transition_kind,
      py::arg("from_"),
      py::arg("to"),
      py::arg("same_order"));
  m.def(
      "moves",
      &moves,
      py::arg("profile"),
      py::arg("cluster"),
      py::arg("from_"),
      py::arg("to"));
  m.def("clipped_cuts", &clipped_cuts, py::arg("cuts"), py::arg("boundary"));
}

void bind_pause(py::module_& m) {
  py::class_<RunningMean>(m, "RunningMean")
      .def(py::init<int64_t, int64_t>(), py::arg("sum_ns"), py::arg("count"))
      .def_readonly("sum_ns", &RunningMean::sum_ns)
      .def_readonly("count", &RunningMean::count);
  py::class_<PauseModel>(m, "PauseModel")
      .def(py::init<>())
      .def_readwrite("prepare", &PauseModel::prepare)
      .def_readwrite("group", &PauseModel::group)
      .def_readwrite("move", &PauseModel::move)
      .def_readwrite("rewire", &PauseModel::rewire)
      .def_readwrite("compare", &PauseModel::compare)
      .def_readwrite("first_step", &PauseModel::first_step);
  py::class_<Pause>(m, "Pause")
      .def_readonly("prepare_ns", &Pause::prepare_ns)
      .def_readonly("move_ns", &Pause::move_ns)
      .def_readonly("rewire_ns", &Pause::rewire_ns)
      .def_readonly("first_step_ns", &Pause::first_step_ns)
      .def_readonly("cache_ns", &Pause::cache_ns)
      .def_property_readonly("total_ns", &Pause::total_ns);
  m.def("observed", &observed, py::arg("mean"), py::arg("ns"), py::arg("per"));
  m.def(
      "predicted_pause",
      &predicted_pause,
      py::arg("model"),
      py::arg("cluster"),
      py::arg("kind"),
      py::arg("moves"),
      py::arg("cache_bytes"));
}

void bind_offers(py::module_& m) {
  py::enum_<Reshape>(m, "Reshape")
      .value("PRICED", Reshape::kPriced)
      .value("ALWAYS", Reshape::kAlways)
      .value("NEVER", Reshape::kNever);
  py::enum_<TransitionRule>(m, "TransitionRule")
      .value("CANNOT_STAY", TransitionRule::kCannotStay)
      .value("ALWAYS", TransitionRule::kAlways)
      .value("PAYS", TransitionRule::kPays)
      .value("NEVER", TransitionRule::kNever)
      .value("TOO_LITTLE", TransitionRule::kTooLittle)
      .value("CROWDED", TransitionRule::kCrowded)
      .value("TOO_DEAR", TransitionRule::kTooDear)
      .value("TOO_SOON", TransitionRule::kTooSoon);
  py::class_<Offer>(m, "Offer")
      .def(py::init<>())
      .def_readwrite("kind", &Offer::kind)
      .def_readwrite("step_in_force_ns", &Offer::step_in_force_ns)
      .def_readwrite("step_ns", &Offer::step_ns)
      .def_readwrite("remaining_steps", &Offer::remaining_steps)
      .def_readwrite("pace_permille", &Offer::pace_permille)
      .def_readwrite("pause_ns", &Offer::pause_ns)
      .def_readwrite("anyway_ns", &Offer::anyway_ns)
      .def_readwrite("hysteresis_permille", &Offer::hysteresis_permille)
      .def_readwrite("since_last_ns", &Offer::since_last_ns)
      .def_readwrite("crowded", &Offer::crowded)
      .def_readwrite("reshape", &Offer::reshape);
  py::class_<Verdict>(m, "Verdict")
      .def_readonly("accepted", &Verdict::accepted)
      .def_readonly("rule", &Verdict::rule)
      .def_readonly("gain_ns_per_step", &Verdict::gain_ns_per_step)
      .def_readonly("extra_pause_ns", &Verdict::extra_pause_ns)
      .def_readonly("pay_back_steps", &Verdict::pay_back_steps);
  m.def("decide", &decide, py::arg("offer"));
  m.def("best_offer", &best_offer, py::arg("offers"), py::arg("verdicts"));
}

}  // namespace

void bind_planner_transition(py::module_& m) {
  bind_moves(m);
  bind_pause(m);
  bind_offers(m);
}

}  // namespace pipetransformer::bindings
