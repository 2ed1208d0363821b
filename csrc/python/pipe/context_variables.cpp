#include "python/pipe/context_variables.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>

#include <memory>
#include <string>

namespace pipetransformer::bindings {

namespace py = pybind11;

namespace {

const std::string kKey = "context";  // torch/autograd/graph.py

py::object copy_of(const py::object& context) {
  PyObject* copy = PyContext_Copy(context.ptr());
  if (copy == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(copy);
}

// What torch has left for the backward under way; none where it has not.
py::object context_of_backward() {
  using at::impl::ThreadLocalPythonObjects;
  if (!ThreadLocalPythonObjects::contains(kKey)) {
    return {};
  }
  PyObject* found =
      ThreadLocalPythonObjects::get(kKey)->ptr(getPyInterpreter());
  if (found == nullptr || !PyContext_CheckExact(found)) {
    return {};
  }
  return py::reinterpret_borrow<py::object>(found);
}

// Entered and left with the GIL.
class BackwardScope {
 public:
  explicit BackwardScope(const py::object& context) {
    const py::gil_scoped_acquire gil;
    const py::object of_backward = context_of_backward();
    if (of_backward) {
      at::impl::ThreadLocalPythonObjects::set(
          kKey,
          std::make_shared<c10::SafePyObject>(
              copy_of(of_backward).release().ptr(), getPyInterpreter()));
    }
    scope_ =
        std::make_unique<ContextScope>(of_backward ? of_backward : context);
  }
  ~BackwardScope() {
    const py::gil_scoped_acquire gil;
    scope_.reset();
  }
  BackwardScope(const BackwardScope&) = delete;
  BackwardScope& operator=(const BackwardScope&) = delete;

 private:
  std::unique_ptr<ContextScope> scope_;
};

}  // namespace

py::object current_context() {
  PyObject* copy = PyContext_CopyCurrent();
  if (copy == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(copy);
}

ContextScope::ContextScope(const py::object& context)
    : entered_(copy_of(context)) {
  if (PyContext_Enter(entered_.ptr()) != 0) {
    throw py::error_already_set();
  }
}

ContextScope::~ContextScope() {
  // An exception on its way must not be lost, nor meet another one.
  const py::error_scope raised;
  if (PyContext_Exit(entered_.ptr()) != 0) {  // a layer left another one behind
    PyErr_WriteUnraisable(entered_.ptr());
  }
}

std::shared_ptr<void>
enter_backward_context(const py::object& context) noexcept {
  return std::make_shared<BackwardScope>(context);
}

}  // namespace pipetransformer::bindings
