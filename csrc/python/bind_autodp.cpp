#include "python/bind_autodp_common.h"

#include <vector>

#include "autodp/control_plane.h"
#include "autodp/groups/active_group.h"
#include "autodp/transfer/tensor_hash.h"
#include "autodp/transfer/transfer.h"

namespace py = pybind11;
using namespace pipetransformer::autodp;
using pipetransformer::bindings::free_without_gil;
using pipetransformer::bindings::Milliseconds;
using pipetransformer::bindings::NoGil;

namespace {

// Runs Python's signal handlers; throws what they raise. Call without the GIL.
void handle_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

void bind_group(py::module_& m) {
  py::class_<ActiveGroup, std::shared_ptr<ActiveGroup>>(m, "ActiveGroup")
      .def(
          py::init([](const std::shared_ptr<ControlPlane>& plane,
                      const c10::intrusive_ptr<c10d::Store>& store,
                      const c10::intrusive_ptr<c10d::Backend>& inner,
                      const c10::intrusive_ptr<c10d::Backend>& on_device,
                      const std::string& device_type,
                      Milliseconds timeout) {
            const auto type = c10::Device(device_type).type();
            return free_without_gil(
                inner ? std::make_unique<ActiveGroup>(
                            plane, store, inner, on_device, type, timeout)
                      : std::make_unique<ActiveGroup>(plane, store, type));
          }),
          py::arg("plane"),
          py::arg("store"),
          py::arg("inner").none(true),
          py::arg("on_device").none(true),
          py::kw_only(),
          py::arg("device_type"),
          py::arg("timeout"))
      .def_property_readonly("process_group", &ActiveGroup::process_group)
      .def("check_ended", &ActiveGroup::check_ended, NoGil())
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
  m.def("hash_replica_tensors", &hash_tensors, NoGil());
}

}  // namespace

namespace pipetransformer::bindings {

void bind_autodp(py::module_& m) {
  // The stores and groups of the signatures below are torch's classes.
  py::module_::import("torch.distributed");
  bind_autodp_failure(m);
  bind_autodp_membership(m);
  bind_autodp_plane(m);
  bind_group(m);
  bind_autodp_transition(m);
}

}  // namespace pipetransformer::bindings
