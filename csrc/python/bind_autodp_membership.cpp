// Who is alive, and who goes on: heartbeats' tracker, and one rank's part in a
// rendezvous, which a plane begins.
#include "python/bind_autodp_common.h"

#include "autodp/failure/liveness.h"
#include "autodp/membership/rendezvous_board.h"

namespace py = pybind11;
using namespace pipetransformer::autodp;

namespace pipetransformer::bindings {

void bind_autodp_membership(py::module_& m) {
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
  py::class_<RendezvousBoard>(m, "RendezvousBoard")
      .def("step", &RendezvousBoard::step, NoGil())
      .def("on_deadline", &RendezvousBoard::on_deadline)
      .def_property_readonly("generation", &RendezvousBoard::generation)
      .def_property_readonly("silent", &RendezvousBoard::silent)
      .def_property_readonly("fenced", &RendezvousBoard::fenced)
      .def_property_readonly("standings", [](const RendezvousBoard& self) {
        py::dict standings;
        for (const auto& [rank, bytes] : self.standings()) {
          standings[py::int_(rank)] = py::bytes(bytes);
        }
        return standings;
      });
}

}  // namespace pipetransformer::bindings
