// What the files that bind the autodp room share. Included by bind_autodp*.cpp
// only.
#pragma once

#include "python/bindings.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
// torch's process groups, stores and works live in intrusive pointers; their
// holder is declared here.
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace pipetransformer::bindings {

using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;
using Milliseconds = std::chrono::milliseconds;

// Destroying a plane or a group may wait for its threads: the deleter releases
// the GIL. The last owner may be C++ as well, where it is not held.
template <typename T>
std::shared_ptr<T> free_without_gil(std::unique_ptr<T> object) {
  return std::shared_ptr<T>(object.release(), [](T* raw) {
    std::unique_ptr<T> last(raw);
    if (PyGILState_Check() != 0) {
      const pybind11::gil_scoped_release no_gil;
      last.reset();
    }
  });
}

inline pybind11::object to_bytes(const std::optional<std::string>& value) {
  if (!value.has_value()) {
    return pybind11::none();
  }
  return pybind11::bytes(*value);
}

}  // namespace pipetransformer::bindings
