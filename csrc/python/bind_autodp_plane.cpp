#include "python/bind_autodp_common.h"

#include <map>
#include <tuple>
#include <vector>

#include "autodp/control_plane.h"
#include "autodp/store/sealed_store.h"
#include "core/plain_text.h"

namespace py = pybind11;
using namespace pipetransformer::autodp;
using pipetransformer::bindings::free_without_gil;
using pipetransformer::bindings::Milliseconds;
using pipetransformer::bindings::NoGil;
using pipetransformer::bindings::to_bytes;

namespace {

using PlaneClass = py::class_<ControlPlane, std::shared_ptr<ControlPlane>>;

void bind_seal(py::module_& m) {
  py::class_<Seal, std::shared_ptr<Seal>>(m, "StoreSeal")
      .def(
          py::init([](const py::bytes& secret) {
            return std::make_shared<Seal>(static_cast<std::string>(secret));
          }),
          py::arg("secret"))
      .def(
          "sealed",
          [](const std::shared_ptr<Seal>& self,
             c10::intrusive_ptr<c10d::Store> store)
              -> c10::intrusive_ptr<c10d::Store> {
            return c10::make_intrusive<SealedStore>(std::move(store), self);
          },
          py::arg("store"))
      .def("refusals", [](const Seal& self) {
        const auto refusals = self.refusals();
        return std::tuple(
            refusals.count, pipetransformer::core::plain_text(refusals.first));
      });
}

void bind_construction(PlaneClass& plane) {
  plane.def(
      py::init([](c10::intrusive_ptr<c10d::Store> store,
                  c10::intrusive_ptr<c10d::Store> watched_store,
                  int rank,
                  int world_size,
                  int store_rank,
                  double heartbeat_interval_s,
                  double heartbeat_timeout_s,
                  double group_timeout_s,
                  bool survives) {
        const py::gil_scoped_release no_gil;
        return free_without_gil(std::make_unique<ControlPlane>(
            std::move(store),
            std::move(watched_store),
            WatcherOptions{
                rank,
                world_size,
                store_rank,
                heartbeat_interval_s,
                heartbeat_timeout_s,
                survives},
            group_timeout_s));
      }),
      py::arg("store"),
      py::arg("watched_store"),
      py::kw_only(),
      py::arg("rank"),
      py::arg("world_size"),
      py::arg("store_rank"),
      py::arg("heartbeat_interval_s"),
      py::arg("heartbeat_timeout_s"),
      py::arg("group_timeout_s"),
      py::arg("survives"));
}

void bind_keys(PlaneClass& plane) {
  plane
      .def(
          "set",
          [](ControlPlane& self, const std::string& key, const py::bytes& v) {
            const auto value = static_cast<std::string>(v);
            const py::gil_scoped_release no_gil;
            self.store().set(key, value);
          })
      .def(
          "read",
          [](ControlPlane& self, const std::string& key) {
            std::optional<std::string> value;
            {
              const py::gil_scoped_release no_gil;
              value = self.store().read(key);
            }
            return to_bytes(value);
          })
      .def(
          "compare_set",
          [](ControlPlane& self,
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
          [](ControlPlane& self, const std::vector<std::string>& keys) {
            self.store().remove(keys);
          },
          NoGil())
      .def(
          "remove_later",
          [](ControlPlane& self, std::vector<std::string> keys) {
            self.store().remove_later(std::move(keys));
          },
          NoGil())
      .def(
          "num_store_operations",
          [](ControlPlane& self) { return self.store().num_operations(); })
      .def(
          "wait_any",
          [](ControlPlane& self,
             const std::vector<std::vector<std::string>>& groups,
             Milliseconds slice) {
            return self.store().wait_any(groups, slice);
          },
          NoGil());
}

void bind_life(PlaneClass& plane) {
  plane
      .def(
          "fail",
          [](ControlPlane& self, const Failure& failure) {
            self.fail(failure);
          },
          NoGil())
      .def(
          "failure",
          [](const ControlPlane& self) { return self.latch()->failure(); })
      .def("check", [](const ControlPlane& self) { self.latch()->check(); })
      .def("ended", [](const ControlPlane& self) { return self.run().ended(); })
      .def(
          "store_loss",
          [](const ControlPlane& self) { return self.run().store_loss(); })
      .def(
          "outlive_store",
          [](ControlPlane& self, bool outlives) {
            self.run().outlive_store(outlives);
          },
          NoGil())
      .def(
          "generation",
          [](const ControlPlane& self) {
            return self.run().generation()->number;
          })
      .def(
          "members",
          [](const ControlPlane& self) {
            return self.run().generation()->members;
          })
      .def(
          "own_key",
          [](const ControlPlane& self, const std::string& name) {
            return self.run().generation()->key(name);
          })
      .def(
          "begin_rendezvous",
          [](ControlPlane& self, const py::bytes& standing) {
            return self.begin_rendezvous(static_cast<std::string>(standing));
          })
      .def("advance", &ControlPlane::advance, NoGil())
      .def("group_store", &ControlPlane::group_store)
      .def(
          "set_epoch",
          [](ControlPlane& self, int64_t epoch) {
            self.run().set_epoch(epoch);
          })
      .def(
          "watch_signals",
          [](ControlPlane& self,
             int read_fd,
             int forward_fd,
             std::map<int, std::string> ends) {
            self.watcher().watch_signals(read_fd, forward_fd, std::move(ends));
          },
          NoGil())
      .def(
          "unwatch_signals",
          [](ControlPlane& self) { self.watcher().unwatch_signals(); },
          NoGil())
      .def("stop_watching", &ControlPlane::stop_watching, NoGil())
      .def("close", &ControlPlane::close, NoGil());
}

}  // namespace

namespace pipetransformer::bindings {

void bind_autodp_plane(py::module_& m) {
  bind_seal(m);
  PlaneClass plane(m, "ControlPlane");
  bind_construction(plane);
  bind_keys(plane);
  bind_life(plane);
}

}  // namespace pipetransformer::bindings
