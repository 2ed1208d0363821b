// The extension module: one submodule per room, nothing else.
#include "python/bindings.h"

namespace py = pybind11;
using namespace pipetransformer::bindings;

namespace {

// pybind11 also lists the submodule in sys.modules, so that Python can import
// from it by its full name.
void add_room(py::module_& m, const char* room, void (*bind)(py::module_&)) {
  py::module_ part = m.def_submodule(room);
  bind(part);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "C++ core of pipetransformer; use the Python package instead.";
  add_room(m, "core", bind_core);
  add_room(m, "device", bind_device);
  add_room(m, "planner", bind_planner);
  add_room(m, "simulator", bind_simulator);
  add_room(m, "autofreeze", bind_autofreeze);
  add_room(m, "pipe", bind_pipe);
  add_room(m, "autodp", bind_autodp);
  add_room(m, "autocache", bind_autocache);
}
