// Failures as Python sees them: a struct with fields, and the exception that
// C++'s becomes.
#include "python/bind_autodp_common.h"

#include <exception>

#include "autodp/failure/failure.h"

namespace py = pybind11;
using namespace pipetransformer::autodp;

namespace {

// Makes the exception for a failure; set once, when the package is imported, so
// that nothing is imported here. Never freed: threads may throw at any time.
py::function* make_error = nullptr;

// Called for every extension that shares pybind11's registry, torch's among
// them: a collective that torch waits for throws our errors, too. What leaves
// here is for the next translator.
void translate(std::exception_ptr error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
  } catch (const PeerFailureError& thrown) {
    if (make_error == nullptr) {
      throw;
    }
    const py::object made = (*make_error)(thrown.failure());
    PyErr_SetObject(py::type::of(made).ptr(), made.ptr());
  }
}

// C++ marks what is not known by a negative number, Python by None.
template <typename Number>
std::optional<Number> known(Number number) {
  return number < 0 ? std::nullopt : std::optional<Number>(number);
}

// Names of files may hold what UTF-8 cannot express.
std::string utf8(const py::str& text) {
  return py::bytes(text.attr("encode")("utf-8", "backslashreplace"));
}

}  // namespace

namespace pipetransformer::bindings {

void bind_autodp_failure(py::module_& m) {
  py::class_<Failure>(m, "Failure")
      .def(
          py::init([](std::optional<int> rank,
                      const py::str& phase,
                      std::optional<int64_t> epoch,
                      std::optional<double> deadline_s,
                      const py::str& reason) {
            return Failure{
                rank.value_or(-1),
                utf8(phase),
                epoch.value_or(-1),
                deadline_s.value_or(-1),
                one_line(utf8(reason))};
          }),
          py::arg("rank"),
          py::arg("phase"),
          py::kw_only(),
          py::arg("epoch") = py::none(),
          py::arg("deadline_s") = py::none(),
          py::arg("reason"))
      .def_property_readonly(
          "rank", [](const Failure& self) { return known(self.rank); })
      .def_readonly("phase", &Failure::phase)
      .def_property_readonly(
          "epoch", [](const Failure& self) { return known(self.epoch); })
      .def_property_readonly(
          "deadline_s",
          [](const Failure& self) { return known(self.deadline_s); })
      .def_readonly("reason", &Failure::reason)
      .def("__str__", &describe);
  m.def("raise_failures_as", [](py::function make) {
    delete std::exchange(make_error, new py::function(std::move(make)));
  });
  py::register_exception_translator(&translate);
}

}  // namespace pipetransformer::bindings
