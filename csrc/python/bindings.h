// Declares one bind function per room. Each lives in bind_<room>.cpp and fills
// the room's submodule. The bindings room is the only one that may include
// Python.h.
#pragma once

#include <pybind11/pybind11.h>

namespace pipetransformer::bindings {

void bind_core(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_planner(pybind11::module_& m);
void bind_planner_solvers(pybind11::module_& m);     // by bind_planner
void bind_planner_transition(pybind11::module_& m);  // by bind_planner
void bind_simulator(pybind11::module_& m);           // after bind_planner
void bind_autofreeze(pybind11::module_& m);
void bind_pipe(pybind11::module_& m);
void bind_autodp(pybind11::module_& m);
void bind_autodp_failure(pybind11::module_& m);     // by bind_autodp
void bind_autodp_membership(pybind11::module_& m);  // by bind_autodp
void bind_autodp_plane(pybind11::module_& m);       // by bind_autodp
void bind_autodp_transition(pybind11::module_& m);  // by bind_autodp
void bind_autocache(pybind11::module_& m);

}  // namespace pipetransformer::bindings
