#include "bindings/bindings.h"

namespace pipetransformer::bindings {

void bind_pipe(pybind11::module_& /*m*/) {}

} // namespace pipetransformer::bindings
