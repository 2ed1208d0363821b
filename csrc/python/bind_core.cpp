#include "python/bindings.h"

#include <string_view>

#include "core/hash.h"
#include "core/heap.h"
#include "core/host_cores.h"
#include "core/host_memory.h"
#include "core/keyed_hash.h"
#include "core/plain_text.h"

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
  m.def("host_cores", &core::host_cores, pybind11::arg("root") = "");
  m.def(
      "keyed_hash",
      [](const pybind11::bytes& key, const pybind11::bytes& data) {
        const auto digest = core::KeyedHash(static_cast<std::string_view>(key))(
            {static_cast<std::string_view>(data)});
        return pybind11::bytes(core::as_text(digest));
      },
      pybind11::arg("key"),
      pybind11::arg("data"));
  m.def(
      "plain_text",
      [](const pybind11::bytes& data, size_t longest) {
        return core::plain_text(static_cast<std::string_view>(data), longest);
      },
      pybind11::arg("data"),
      pybind11::arg("longest") = core::kLongestText);
  using core::HostMemory;
  pybind11::class_<HostMemory>(m, "HostMemory")
      .def_readonly("total_bytes", &HostMemory::total_bytes)
      .def_readonly("limit_bytes", &HostMemory::limit_bytes)
      .def_readonly("available_bytes", &HostMemory::available_bytes)
      .def_readonly("limited_by", &HostMemory::limited_by);
  m.def("host_memory", &core::host_memory, pybind11::arg("root") = "");
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  m.def("keep_freed_memory", &core::keep_freed_memory);
  m.def("give_back_freed_memory", &core::give_back_freed_memory, Unlocked());
  m.def(
      "stop_keeping_freed_memory",
      &core::stop_keeping_freed_memory,
      Unlocked());
}

}  // namespace pipetransformer::bindings
