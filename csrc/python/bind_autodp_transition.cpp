#include "python/bind_autodp_common.h"

#include <vector>

#include "autodp/control_plane.h"
#include "autodp/store/store_board.h"

namespace py = pybind11;
using namespace pipetransformer::autodp;

namespace pipetransformer::bindings {

void bind_autodp_transition(py::module_& m) {
  m.def(
      "announced_epoch",
      [](ControlPlane& plane, const std::string& prefix) {
        StoreBoard board(plane.store(), prefix);
        return announced_epoch(board);
      },
      NoGil());
  py::class_<Transition>(m, "PlanTransition")
      .def(
          py::init([](int rank,
                      int world_size,
                      int64_t epoch,
                      bool writer,
                      const std::vector<int>& participants,
                      const std::string& run,
                      const std::optional<std::string>& parent,
                      double timeout_s) {
            return Transition(TransitionOptions{
                rank,
                world_size,
                epoch,
                writer,
                participants,
                run,
                parent,
                timeout_s});
          }),
          py::kw_only(),
          py::arg("rank"),
          py::arg("world_size"),
          py::arg("epoch"),
          py::arg("writer"),
          py::arg("participants"),
          py::arg("run"),
          py::arg("parent").none(true),
          py::arg("timeout_s"))
      .def(
          "announce",
          [](Transition& self, const py::bytes& plan) {
            self.announce(static_cast<std::string>(plan));
          })
      .def("receive", &Transition::receive)
      .def("meet", &Transition::meet)
      .def(
          "acknowledge",
          [](Transition& self, const std::string& refusal, bool waited) {
            self.acknowledge(Answer{refusal, waited});
          },
          py::arg("refusal"),
          py::kw_only(),
          py::arg("waited"))
      .def("decide", &Transition::decide)
      .def(
          "drive",
          [](Transition& self,
             ControlPlane& plane,
             const std::string& prefix,
             Milliseconds slice) {
            StoreBoard board(plane.store(), prefix);
            return drive(self, board, slice);
          },
          NoGil())
      .def(
          "is_decided",
          [](const Transition& self,
             ControlPlane& plane,
             const std::string& prefix) {
            StoreBoard board(plane.store(), prefix);
            return self.is_decided(board);
          },
          NoGil())
      .def(
          "is_past",
          [](const Transition& self,
             ControlPlane& plane,
             const std::string& prefix) {
            StoreBoard board(plane.store(), prefix);
            return self.is_past(board);
          },
          NoGil())
      .def(
          "plan",
          [](const Transition& self) -> py::object {
            const auto& message = self.message();
            return message ? to_bytes(message->plan) : py::none();
          })
      .def(
          "participants",
          [](const Transition& self) {
            const auto& message = self.message();
            return message ? message->participants : std::vector<int>();
          })
      .def("hash", &Transition::hash)
      .def("mismatch", &Transition::mismatch)
      .def("met", &Transition::met)
      .def("fenced", &Transition::fenced)
      .def("announce_error", &Transition::announce_error)
      .def(
          "committed",
          [](const Transition& self) -> std::optional<bool> {
            const auto& verdict = self.verdict();
            if (!verdict.has_value()) {
              return std::nullopt;
            }
            return verdict->outcome == Outcome::kCommit;
          })
      .def(
          "reason",
          [](const Transition& self) {
            return self.verdict().value_or(Verdict()).reason;
          })
      .def(
          "missing",
          [](const Transition& self) {
            return self.verdict().value_or(Verdict()).missing;
          })
      .def("refused", [](const Transition& self) {
        return self.verdict().value_or(Verdict()).refused;
      });
}

}  // namespace pipetransformer::bindings
