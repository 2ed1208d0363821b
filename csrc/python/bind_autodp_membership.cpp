// Generations, the roll call, and life without the store: free functions over
// the plane, and one rank's part in a roll call.
#include "python/bind_autodp_membership.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>

#include "autodp/failure/liveness.h"
#include "autodp/message_plane.h"

namespace py = pybind11;
using namespace pipetransformer::autodp;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using FailureTuple = std::tuple<int, std::string, int64_t, double, std::string>;

std::optional<FailureTuple> to_tuple(const std::optional<Failure>& failure) {
  if (!failure.has_value()) {
    return std::nullopt;
  }
  return FailureTuple(
      failure->rank,
      failure->phase,
      failure->epoch,
      failure->deadline_s,
      failure->reason);
}

void bind_roll(py::module_& m) {
  py::class_<LivenessTracker>(m, "LivenessTracker")
      .def(
          py::init<double, double, double>(),
          py::arg("timeout_s"),
          py::arg("start_timeout_s"),
          py::arg("now_s"))
      .def(
          "observe",
          &LivenessTracker::observe,
          py::arg("counter"),
          py::arg("now_s"));
  py::class_<RollBoard>(m, "RollBoard")
      .def(
          py::init([](MessagePlane& plane, const py::bytes& standing) {
            auto bytes = static_cast<std::string>(standing);
            return plane.begin_roll(std::move(bytes));
          }),
          py::arg("plane"),
          py::arg("standing"))
      .def("step", &RollBoard::step, NoGil())
      .def("on_deadline", &RollBoard::on_deadline)
      .def_property_readonly("generation", &RollBoard::generation)
      .def_property_readonly("silent", &RollBoard::silent)
      .def_property_readonly("fenced", &RollBoard::fenced)
      .def_property_readonly("standings", [](const RollBoard& self) {
        py::dict standings;
        for (const auto& [rank, bytes] : self.standings()) {
          standings[py::int_(rank)] = py::bytes(bytes);
        }
        return standings;
      });
}

}  // namespace

namespace pipetransformer::bindings {

void bind_autodp_membership(py::module_& m) {
  bind_roll(m);
  m.def("plane_generation", [](const MessagePlane& plane) {
    const auto generation = plane.run().generation();
    return std::make_tuple(generation->number, generation->members);
  });
  m.def("plane_advance", &MessagePlane::advance, NoGil());
  m.def("plane_ended", [](const MessagePlane& plane) {
    return to_tuple(plane.run().ended());
  });
  m.def("plane_store_loss", [](const MessagePlane& plane) {
    return to_tuple(plane.run().store_loss());
  });
  m.def(
      "plane_outlive_store",
      [](MessagePlane& plane, bool outlives) {
        plane.run().outlive_store(outlives);
      },
      NoGil());
  m.def("plane_group_store", &MessagePlane::group_store);
}

}  // namespace pipetransformer::bindings
