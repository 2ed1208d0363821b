#include "bindings/bindings.h"

#include <string_view>

#include "core/hash.h"

namespace pipetransformer::bindings {

void bind_core(pybind11::module_& m) {
  m.def(
      "hash_bytes",
      [](const pybind11::bytes& data, uint64_t seed) {
        const auto view = static_cast<std::string_view>(data);
        return core::hash_bytes(view.data(), view.size(), seed);
      },
      pybind11::arg("data"),
      pybind11::arg("seed") = core::kHashSeed);
}

}  // namespace pipetransformer::bindings
