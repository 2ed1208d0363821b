#include "bindings/bindings.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>

#include "autodp/active_group.h"
#include "autodp/decision.h"
#include "autodp/message_plane.h"
#include "autodp/transfer.h"
#include "bindings/bind_autodp_membership.h"

// torch's process groups, stores and works live in intrusive pointers; the
// holder is declared by torch/csrc/utils/pybind.h.
namespace py = pybind11;
using namespace pipetransformer::autodp;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Milliseconds = std::chrono::milliseconds;
using FailureTuple = std::tuple<int, std::string, int64_t, double, std::string>;

// Runs Python's signal handlers; throws what they raise. Call without the GIL.
void handle_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

// Destroying a plane or a group may wait for its threads: the deleter releases
// the GIL. The last owner may be C++ as well, where it is not held.
template <typename T>
std::shared_ptr<T> free_without_gil(std::unique_ptr<T> object) {
  return std::shared_ptr<T>(object.release(), [](T* raw) {
    std::unique_ptr<T> last(raw);
    if (PyGILState_Check() != 0) {
      const py::gil_scoped_release no_gil;
      last.reset();
    }
  });
}

py::object to_bytes(const std::optional<std::string>& value) {
  if (!value.has_value()) {
    return py::none();
  }
  return py::bytes(*value);
}

void bind_plane(py::module_& m) {
  py::class_<MessagePlane, std::shared_ptr<MessagePlane>>(m, "MessagePlane")
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store,
                      int rank,
                      int world_size,
                      int store_rank,
                      double heartbeat_interval_s,
                      double heartbeat_timeout_s,
                      double start_timeout_s,
                      bool survives) {
            const py::gil_scoped_release no_gil;
            return free_without_gil(std::make_unique<MessagePlane>(
                store,
                WatcherOptions{
                    rank,
                    world_size,
                    store_rank,
                    heartbeat_interval_s,
                    heartbeat_timeout_s,
                    start_timeout_s,
                    survives}));
          }),
          py::arg("store"),
          py::kw_only(),
          py::arg("rank"),
          py::arg("world_size"),
          py::arg("store_rank"),
          py::arg("heartbeat_interval_s"),
          py::arg("heartbeat_timeout_s"),
          py::arg("start_timeout_s"),
          py::arg("survives"))
      .def(
          "set",
          [](MessagePlane& self, const std::string& key, const py::bytes& v) {
            const auto value = static_cast<std::string>(v);
            const py::gil_scoped_release no_gil;
            self.store().set(key, value);
          })
      .def(
          "read",
          [](MessagePlane& self, const std::string& key) {
            std::optional<std::string> value;
            {
              const py::gil_scoped_release no_gil;
              value = self.store().read(key);
            }
            return to_bytes(value);
          })
      .def(
          "compare_set",
          [](MessagePlane& self,
             const std::string& key,
             const py::bytes& expected,
             const py::bytes& desired) {
            auto before = static_cast<std::string>(expected);
            auto after = static_cast<std::string>(desired);
            {
              const py::gil_scoped_release no_gil;
              after = self.store().compare_set(key, before, after);
            }
            return py::bytes(after);
          })
      .def(
          "remove",
          [](MessagePlane& self, const std::vector<std::string>& keys) {
            self.store().remove(keys);
          },
          NoGil())
      .def(
          "remove_later",
          [](MessagePlane& self, std::vector<std::string> keys) {
            self.store().remove_later(std::move(keys));
          },
          NoGil())
      .def(
          "wait_any",
          [](MessagePlane& self,
             const std::vector<std::vector<std::string>>& groups,
             Milliseconds slice) {
            return self.store().wait_any(groups, slice);
          },
          NoGil())
      .def(
          "fail",
          [](MessagePlane& self, const FailureTuple& failure) {
            const auto& [rank, phase, epoch, deadline_s, reason] = failure;
            self.fail(Failure{rank, phase, epoch, deadline_s, reason});
          },
          NoGil())
      .def(
          "failure",
          [](const MessagePlane& self) -> std::optional<FailureTuple> {
            const auto failure = self.latch()->failure();
            if (!failure.has_value()) {
              return std::nullopt;
            }
            return FailureTuple(
                failure->rank,
                failure->phase,
                failure->epoch,
                failure->deadline_s,
                failure->reason);
          })
      .def(
          "set_epoch",
          [](MessagePlane& self, int64_t epoch) {
            self.run().set_epoch(epoch);
          })
      .def(
          "watch_signals",
          [](MessagePlane& self, int read_fd, int forward_fd) {
            self.watcher().watch_signals(read_fd, forward_fd);
          },
          NoGil())
      .def(
          "unwatch_signals",
          [](MessagePlane& self) { self.watcher().unwatch_signals(); },
          NoGil())
      .def("stop_watching", &MessagePlane::stop_watching, NoGil())
      .def("close", &MessagePlane::close, NoGil());
}

void bind_group(py::module_& m) {
  py::class_<ActiveGroup, std::shared_ptr<ActiveGroup>>(m, "ActiveGroup")
      .def(
          py::init([](const std::shared_ptr<MessagePlane>& plane,
                      const c10::intrusive_ptr<c10d::Store>& store,
                      const c10::intrusive_ptr<c10d::Backend>& inner,
                      const std::string& device_type,
                      Milliseconds timeout) {
            const auto type = c10::Device(device_type).type();
            return free_without_gil(
                inner ? std::make_unique<ActiveGroup>(
                            plane, store, inner, type, timeout)
                      : std::make_unique<ActiveGroup>(plane, store, type));
          }),
          py::arg("plane"),
          py::arg("store"),
          py::arg("inner").none(true),
          py::kw_only(),
          py::arg("device_type"),
          py::arg("timeout"))
      .def_property_readonly("process_group", &ActiveGroup::process_group)
      .def("retire", &ActiveGroup::retire, NoGil());
  m.def(
      "wait_done",
      [](const c10::intrusive_ptr<c10d::Work>& work, Milliseconds slice) {
        return wait_done(*work, slice);
      },
      NoGil());
  m.def(
      "broadcast_tensors",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group,
         const std::vector<at::Tensor>& tensors,
         int64_t source,
         int64_t bucket_bytes) {
        return broadcast_tensors(
            *group, tensors, source, bucket_bytes, handle_signals);
      },
      py::arg("group"),
      py::arg("tensors"),
      py::kw_only(),
      py::arg("source"),
      py::arg("bucket_bytes"),
      NoGil());
  m.def("hash_replica_tensor", &hash_tensor, NoGil());
}

void bind_decision(py::module_& m) {
  // Outcomes cross as booleans: True is a commit.
  const auto to_bool = [](std::optional<Outcome> outcome) {
    return outcome ? std::optional<bool>(*outcome == Outcome::kCommit)
                   : std::nullopt;
  };
  py::class_<DecisionMachine>(m, "DecisionMachine")
      .def(
          py::init<bool, const std::vector<int>&>(),
          py::arg("writer"),
          py::arg("participants"))
      .def("on_acknowledge", &DecisionMachine::on_acknowledge)
      .def("on_deadline", &DecisionMachine::on_deadline)
      .def(
          "on_decision",
          [](DecisionMachine& self, bool commit) {
            self.on_decision(commit ? Outcome::kCommit : Outcome::kAbort);
          })
      .def(
          "proposal",
          [to_bool](const DecisionMachine& self) {
            return to_bool(self.proposal());
          })
      .def(
          "outcome",
          [to_bool](const DecisionMachine& self) {
            return to_bool(self.outcome());
          })
      .def("missing", &DecisionMachine::missing);
}

}  // namespace

namespace pipetransformer::bindings {

void bind_autodp(py::module_& m) {
  // The stores and groups of the signatures below are torch's classes.
  py::module_::import("torch.distributed");
  bind_plane(m);
  bind_autodp_membership(m);
  bind_group(m);
  bind_decision(m);
}

}  // namespace pipetransformer::bindings
