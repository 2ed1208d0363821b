#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>

#include "autocache/activation_store.h"
#include "autocache/codec.h"
#include "autocache/content_hash.h"
#include "autocache/disk_index.h"
#include "autocache/disk_tier.h"
#include "autocache/encoded_rows.h"
#include "autocache/slab.h"
#include "python/bindings.h"

namespace pipetransformer::bindings {

namespace py = pybind11;
using autocache::ActivationStore;
using autocache::CacheCounts;
using autocache::Codec;
using autocache::DiskIndex;
using autocache::DiskIoKind;
using autocache::DiskOptions;
using autocache::DiskTier;
using autocache::EncodedTensor;
using autocache::FileCounts;
using autocache::Slab;

namespace {

// Of a disk tier, as this process has it open.
struct DiskFacts {
  int descriptor;  // of the index
  int file_descriptor;
  bool direct;
  int64_t file_bytes;
  int64_t used_bytes;
  int read_error;
  int write_error;
  std::string io;
  int64_t read_bytes;
  int64_t read_ns;
  int64_t wait_ns;
  int64_t written_bytes;
  int64_t write_ns;
};

using Group = std::tuple<
    int64_t,
    at::Tensor,
    std::optional<at::Tensor>,
    std::vector<autocache::RowsTensor>,
    bool>;

Codec codec_of(const std::string& name) {
  constexpr std::array<const char*, autocache::kNumCodecs> kNames{
      "native", "bf16", "fp16", "int8"};
  for (uint8_t k = 0; k < kNames.size(); ++k) {
    if (name == kNames[k]) {
      return static_cast<Codec>(k);
    }
  }
  C10_THROW_ERROR(
      ValueError, "codec: expected native, bf16, fp16 or int8, got " + name);
}

// Throws what Python knows as OSError with its errno; needs the GIL.
[[noreturn]] void raise_os_error(const std::system_error& error) {
  const py::tuple arguments =
      py::make_tuple(error.code().value(), std::string(error.what()));
  PyErr_SetObject(PyExc_OSError, arguments.ptr());
  throw py::error_already_set();
}

template <class Make>
std::unique_ptr<ActivationStore> opened(Make make, bool verify_all) {
  try {
    const py::gil_scoped_release release;
    return std::make_unique<ActivationStore>(make(), verify_all);
  } catch (const std::system_error& error) {
    raise_os_error(error);
  }
}

std::unique_ptr<ActivationStore> create(
    const std::string& run_id,
    uint64_t num_samples,
    uint64_t slot_bytes,
    uint64_t budget_bytes,
    bool ragged,
    bool verify_all) {
  return opened(
      [&] {
        return Slab::create(
            {run_id, num_samples, slot_bytes, budget_bytes, ragged});
      },
      verify_all);
}

// How long to wait for a batch, and what moves the bytes: "io_uring",
// "threads", or "" for whichever there is.
DiskOptions disk_options(int64_t patience_ms, const std::string& io) {
  DiskOptions options;
  options.patience = std::chrono::milliseconds(patience_ms);
  options.io = io == "io_uring"  ? DiskIoKind::kUring
               : io == "threads" ? DiskIoKind::kThreads
                                 : DiskIoKind::kAny;
  return options;
}

template <class Make>
void add_disk(ActivationStore& store, Make make, const DiskOptions& options) {
  try {
    const py::gil_scoped_release release;
    store.add_disk(make(), options);
  } catch (const std::system_error& error) {
    raise_os_error(error);
  }
}

void create_disk(
    ActivationStore& store,
    const std::string& run_id,
    const std::string& directory,
    uint64_t bytes,
    uint64_t least_bytes,
    int64_t patience_ms,
    const std::string& io) {
  const auto num_samples = static_cast<uint64_t>(store.num_samples());
  add_disk(
      store,
      [&] {
        return DiskIndex::create(
            {run_id, directory, num_samples, bytes, least_bytes});
      },
      disk_options(patience_ms, io));
}

void attach_disk(
    ActivationStore& store,
    const std::string& run_id,
    const std::string& index_path,
    const std::string& file_path,
    int64_t patience_ms,
    const std::string& io) {
  add_disk(
      store,
      [&] { return DiskIndex::attach(index_path, file_path, run_id); },
      disk_options(patience_ms, io));
}

// Nothing without a disk tier.
std::optional<DiskFacts> disk_facts(const ActivationStore& store) {
  const std::shared_ptr<DiskTier> disk = store.disk();
  if (disk == nullptr) {
    return std::nullopt;
  }
  const DiskIndex& index = disk->index();
  const autocache::DiskTraffic traffic = disk->traffic();
  return DiskFacts{
      index.descriptor(),
      index.file_descriptor(),
      index.direct(),
      static_cast<int64_t>(index.file_bytes()),
      static_cast<int64_t>(index.used_bytes()),
      disk->read_error(),
      disk->write_error(),
      disk->io_name(),
      static_cast<int64_t>(traffic.reads.bytes),
      traffic.reads.busy.count(),
      traffic.read_wait.count(),
      static_cast<int64_t>(traffic.writes.bytes),
      traffic.writes.busy.count()};
}

std::unique_ptr<ActivationStore>
attach(const std::string& path, const std::string& run_id, bool verify_all) {
  return opened([&] { return Slab::attach(path, run_id); }, verify_all);
}

// What `work` finds in a file, without the GIL.
template <class Work>
FileCounts of_file(Work work) {
  try {
    const py::gil_scoped_release release;
    return work();
  } catch (const std::system_error& error) {
    raise_os_error(error);
  }
}

// `older`: descriptor, first byte, end.
FileCounts save(
    const ActivationStore& store,
    int descriptor,
    uint64_t begin,
    const std::optional<std::tuple<int, uint64_t, uint64_t>>& older,
    bool incomplete) {
  std::optional<autocache::RecordFile> file;
  if (older) {
    const auto& [from, first, end] = *older;
    file = autocache::RecordFile{from, first, end};
  }
  return of_file(
      [&] { return store.save(descriptor, begin, file, incomplete); });
}

FileCounts
load(ActivationStore& store, int descriptor, uint64_t begin, uint64_t end) {
  return of_file([&] { return store.load(descriptor, begin, end); });
}

FileCounts check_records(int descriptor, uint64_t begin, uint64_t end) {
  return of_file(
      [&] { return autocache::check_records(descriptor, begin, end); });
}

std::vector<Group> fetch(
    ActivationStore& store,
    const at::Tensor& ids,
    const std::vector<uint64_t>& chain,
    const std::optional<at::Tensor>& input_hashes,
    const std::vector<double>& fills,
    int64_t length,
    const std::string& codec,
    bool use_disk,
    bool encoded) {
  std::vector<Group> groups;
  for (auto& group : store.fetch(
           ids,
           chain,
           input_hashes,
           {fills, length},
           codec_of(codec),
           use_disk,
           encoded)) {
    std::optional<at::Tensor> lengths;
    if (group.lengths.defined()) {
      lengths = group.lengths;
    }
    groups.emplace_back(
        group.boundary,
        group.rows,
        lengths,
        std::move(group.tensors),
        group.lossy);
  }
  return groups;
}

int64_t store(
    ActivationStore& store,
    const at::Tensor& ids,
    const std::vector<autocache::RowsTensor>& tensors,
    uint32_t boundary,
    uint64_t fingerprint,
    const std::optional<at::Tensor>& input_hashes,
    const std::vector<bool>& ragged,
    const std::optional<at::Tensor>& lengths,
    const std::string& codec,
    bool use_disk) {
  return store.store(
      ids,
      tensors,
      boundary,
      fingerprint,
      input_hashes,
      ragged,
      lengths,
      codec_of(codec),
      use_disk);
}

std::vector<at::Tensor> round_trip(
    const std::vector<at::Tensor>& tensors,
    const std::string& codec,
    const std::vector<bool>& ragged,
    const std::optional<at::Tensor>& lengths) {
  return autocache::round_trip(tensors, codec_of(codec), ragged, lengths);
}

}  // namespace

void bind_autocache(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<CacheCounts>(m, "CacheCounts")
      .def_readonly("hits", &CacheCounts::hits)
      .def_readonly("misses", &CacheCounts::misses)
      .def_readonly("stale", &CacheCounts::stale)
      .def_readonly("changed", &CacheCounts::changed)
      .def_readonly("corrupt", &CacheCounts::corrupt)
      .def_readonly("stored", &CacheCounts::stored)
      .def_readonly("skipped", &CacheCounts::skipped)
      .def_readonly("full", &CacheCounts::full)
      .def_readonly("disk_hits", &CacheCounts::disk_hits)
      .def_readonly("late", &CacheCounts::late);
  py::class_<DiskFacts>(m, "DiskFacts")
      .def_readonly("descriptor", &DiskFacts::descriptor)
      .def_readonly("file_descriptor", &DiskFacts::file_descriptor)
      .def_readonly("direct", &DiskFacts::direct)
      .def_readonly("file_bytes", &DiskFacts::file_bytes)
      .def_readonly("used_bytes", &DiskFacts::used_bytes)
      .def_readonly("read_error", &DiskFacts::read_error)
      .def_readonly("write_error", &DiskFacts::write_error)
      .def_readonly("io", &DiskFacts::io)
      .def_readonly("read_bytes", &DiskFacts::read_bytes)
      .def_readonly("read_ns", &DiskFacts::read_ns)
      .def_readonly("wait_ns", &DiskFacts::wait_ns)
      .def_readonly("written_bytes", &DiskFacts::written_bytes)
      .def_readonly("write_ns", &DiskFacts::write_ns);
  py::class_<EncodedTensor>(m, "EncodedTensor")
      .def(
          py::init([](const at::Tensor& bytes,
                      const at::Tensor& offsets,
                      const at::Tensor& codecs,
                      const std::vector<int64_t>& sizes,
                      at::ScalarType dtype) {
            return EncodedTensor{bytes, offsets, codecs, sizes, dtype, {}};
          }),
          py::arg("bytes"),
          py::arg("offsets"),
          py::arg("codecs"),
          py::arg("sizes"),
          py::arg("dtype"))
      .def_readonly("bytes", &EncodedTensor::bytes)
      .def_readonly("offsets", &EncodedTensor::offsets)
      .def_readonly("codecs", &EncodedTensor::codecs)
      .def_readonly("sizes", &EncodedTensor::sizes)
      .def_readonly("dtype", &EncodedTensor::dtype)
      .def_readonly("fill", &EncodedTensor::fill);
  py::class_<FileCounts>(m, "FileCounts")
      .def_readonly("records", &FileCounts::records)
      .def_readonly("damaged", &FileCounts::damaged)
      .def_readonly("taken", &FileCounts::taken)
      .def_readonly("left", &FileCounts::left)
      .def_readonly("bytes", &FileCounts::bytes);
  py::class_<ActivationStore>(m, "ActivationStore")
      .def_static(
          "create",
          &create,
          py::arg("run_id"),
          py::arg("num_samples"),
          py::arg("slot_bytes"),
          py::arg("budget_bytes"),
          py::arg("ragged"),
          py::arg("verify_all"))
      .def_static(
          "attach",
          &attach,
          py::arg("path"),
          py::arg("run_id"),
          py::arg("verify_all"))
      .def(
          "fetch",
          &fetch,
          py::arg("ids"),
          py::arg("chain"),
          py::arg("input_hashes"),
          py::arg("fills"),
          py::arg("length"),
          py::arg("codec"),
          py::arg("use_disk"),
          py::arg("encoded"),
          NoGil())
      .def(
          "store",
          &store,
          py::arg("ids"),
          py::arg("tensors"),
          py::arg("boundary"),
          py::arg("fingerprint"),
          py::arg("input_hashes"),
          py::arg("ragged"),
          py::arg("lengths"),
          py::arg("codec"),
          py::arg("use_disk"),
          NoGil())
      .def(
          "save",
          &save,
          py::arg("descriptor"),
          py::arg("begin"),
          py::arg("older") = py::none(),
          py::arg("incomplete") = false)
      .def(
          "load",
          &load,
          py::arg("descriptor"),
          py::arg("begin"),
          py::arg("end"))
      .def(
          "create_disk",
          &create_disk,
          py::kw_only(),
          py::arg("run_id"),
          py::arg("directory"),
          py::arg("bytes"),
          py::arg("least_bytes"),
          py::arg("patience_ms"),
          py::arg("io"))
      .def(
          "attach_disk",
          &attach_disk,
          py::kw_only(),
          py::arg("run_id"),
          py::arg("index_path"),
          py::arg("file_path"),
          py::arg("patience_ms"),
          py::arg("io"))
      .def("disk", &disk_facts)
      .def("prefetch", &ActivationStore::prefetch, py::arg("samples"), NoGil())
      .def("counts", &ActivationStore::counts)
      .def("clear", &ActivationStore::clear, NoGil())
      .def("close", &ActivationStore::close, NoGil())
      .def("give_up", &ActivationStore::give_up)
      .def_property_readonly("given_up", &ActivationStore::given_up)
      .def_property_readonly("num_clears", &ActivationStore::num_clears)
      .def_property_readonly("num_samples", &ActivationStore::num_samples)
      .def_property_readonly("num_slots", &ActivationStore::num_slots)
      .def_property_readonly("slot_bytes", &ActivationStore::slot_bytes)
      .def_property_readonly("used_bytes", &ActivationStore::used_bytes)
      .def_property_readonly("descriptor", &ActivationStore::descriptor);
  m.def(
      "slots_within",
      &Slab::slots_within,
      py::arg("budget_bytes"),
      py::kw_only(),
      py::arg("num_samples"),
      py::arg("slot_bytes"));
  m.def(
      "check_records",
      &check_records,
      py::arg("descriptor"),
      py::arg("begin"),
      py::arg("end"));
  m.def("record_bytes", &autocache::record_bytes, py::arg("tensors"));
  m.attr("MAX_TENSORS") = autocache::kMaxTensors;
  m.attr("MAX_DIMS") = autocache::kMaxDims;
  m.def(
      "round_trip",
      &round_trip,
      py::arg("tensors"),
      py::arg("codec"),
      py::arg("ragged"),
      py::arg("lengths"),
      NoGil());
  m.def(
      "hash_tensor",
      &autocache::hash_tensor,
      py::arg("tensor"),
      py::arg("seed"),
      NoGil());
  m.def(
      "hash_rows",
      &autocache::hash_rows,
      py::arg("tensors"),
      py::arg("ragged"),
      py::arg("lengths"),
      NoGil());
}

}  // namespace pipetransformer::bindings
