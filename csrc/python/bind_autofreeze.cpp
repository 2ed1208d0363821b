#include "python/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "autofreeze/add_each.h"
#include "autofreeze/alpha_cap.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

// Ops (squared_norms) register themselves with torch's dispatcher; plain
// functions are bound here, and what each step calls with a tensor per
// parameter: lists pass the dispatcher more slowly than they are added.
void bind_autofreeze(py::module_& m) {
  m.def("check_alpha", &autofreeze::check_alpha, py::arg("alpha"));
  m.def(
      "alpha_cap_advance",
      [](double alpha,
         int64_t num_units,
         int64_t min_active,
         double frozen,
         int64_t num_frozen,
         const std::vector<double>& gradient_norms) {
        const auto state = autofreeze::advance(
            {alpha, num_units, min_active},
            {frozen, num_frozen},
            gradient_norms);
        return std::make_tuple(state.frozen, state.num_frozen);
      },
      py::kw_only(),
      py::arg("alpha"),
      py::arg("num_units"),
      py::arg("min_active"),
      py::arg("frozen"),
      py::arg("num_frozen"),
      py::arg("gradient_norms"));
  m.def(
      "add_each",
      [](const std::vector<at::Tensor>& sums,
         const std::vector<at::Tensor>& addends) {
        const py::gil_scoped_release released;
        autofreeze::add_each(sums, addends);
      },
      py::arg("sums"),
      py::arg("addends"));
}

}  // namespace pipetransformer::bindings
