#include "bindings/bindings.h"

namespace pipetransformer::bindings {

void bind_autofreeze(pybind11::module_& /*m*/) {}

} // namespace pipetransformer::bindings
