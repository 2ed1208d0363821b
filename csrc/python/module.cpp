// The extension module: one bind function per room, nothing else.
#include "python/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "C++ core of pipetransformer; use the Python package instead.";
  pipetransformer::bindings::bind_core(m);
  pipetransformer::bindings::bind_planner(m);
  pipetransformer::bindings::bind_simulator(m);
  pipetransformer::bindings::bind_planner_transition(m);
  pipetransformer::bindings::bind_autofreeze(m);
  pipetransformer::bindings::bind_pipe(m);
  pipetransformer::bindings::bind_autodp(m);
  pipetransformer::bindings::bind_autocache(m);
}
