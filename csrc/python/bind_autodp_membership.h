// The part of bind_autodp that binds generations and the roll call; the class
// MessagePlane must be bound before.
#pragma once

#include <pybind11/pybind11.h>

namespace pipetransformer::bindings {

void bind_autodp_membership(pybind11::module_& m);

}  // namespace pipetransformer::bindings
