// Copies between the host and devices, for the training loop.
#include <torch/csrc/utils/pybind.h>

#include "device/host_copies.h"
#include "python/bindings.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

void bind_device(py::module_& m) {
  using device::HostCopies;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<device::Mark>(m, "Mark").def("wait", &device::Mark::wait, no_gil);
  py::class_<HostCopies>(m, "HostCopies")
      .def(py::init<>())
      .def(
          "bring",
          &HostCopies::bring,
          py::arg("value"),
          py::arg("target"),
          no_gil)
      .def("mark", &HostCopies::mark, py::arg("device"), no_gil)
      .def(
          "read", &HostCopies::read, py::arg("value"), py::arg("mark"), no_gil);
}

}  // namespace pipetransformer::bindings
