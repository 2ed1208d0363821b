#include "python/pipe/stages.h"

#include <ATen/EmptyTensor.h>
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>

#include "pipe/random.h"
#include "python/pipe/context_variables.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

namespace {

py::object
call(const py::object& function, const py::tuple& args, const py::object& kw) {
  const bool named = kw.ptr() != nullptr && PyDict_Size(kw.ptr()) > 0;
  PyObject* result =
      PyObject_Call(function.ptr(), args.ptr(), named ? kw.ptr() : nullptr);
  if (result == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

bool is_several(const py::object& value) {
  return py::isinstance<py::tuple>(value) || py::isinstance<py::list>(value);
}

// References to a tensor's Python object, one of which is the caller's here.
Py_ssize_t references_of(const at::Tensor& tensor) {
  const auto object =
      py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return Py_REFCNT(object.ptr());
}

// Those where Python has let go of a tensor that C++ holds: how torch keeps its
// Python object then differs between versions.
Py_ssize_t references_of_nobody() {
  const at::Tensor tensor = at::detail::empty_cpu({0}, at::kFloat);
  references_of(tensor);
  return references_of(tensor);
}

// What PipeSequential.forward does.
py::object call_layers(
    const py::tuple& layers,
    int64_t first_layer,
    const py::tuple& args,
    const py::object& kwargs) {
  py::object value;
  for (std::size_t k = 0; k < layers.size(); ++k) {
    pipe::set_draw_layer(first_layer + static_cast<int64_t>(k));
    const py::object layer = layers[k];
    if (k == 0) {
      value = call(layer, args, kwargs);
    } else if (is_several(value)) {
      value = call(layer, py::tuple(value), py::object());
    } else {
      value = py::reinterpret_steal<py::object>(
          PyObject_CallOneArg(layer.ptr(), value.ptr()));
      if (!value) {
        throw py::error_already_set();
      }
    }
  }
  return value;
}

// The tensors from `first` on, undefined ones as None.
py::list lane_values(const pipe::Tensors& tensors, std::size_t first) {
  py::list values(tensors.size() - first);
  for (std::size_t k = first; k < tensors.size(); ++k) {
    values[k - first] =
        tensors[k].defined() ? py::cast(tensors[k]) : py::object(py::none());
  }
  return values;
}

void add_lane_tensors(const py::handle& stashed, pipe::Tensors& tensors) {
  for (const py::handle value : py::reinterpret_borrow<py::tuple>(stashed)) {
    if (!value.is_none() && !THPVariable_Check(value.ptr())) {
      throw py::type_error(
          "skip: expected a tensor or None, got " +
          py::str(py::type::of(value).attr("__name__")).cast<std::string>());
    }
    tensors.push_back(
        value.is_none() ? at::Tensor() : THPVariable_Unpack(value.ptr()));
  }
}

py::tuple prepend(const py::object& first, const py::tuple& rest) {
  py::tuple all(rest.size() + 1);
  all[0] = first;
  for (std::size_t k = 0; k < rest.size(); ++k) {
    all[k + 1] = rest[k];
  }
  return all;
}

}  // namespace

PythonStages::PythonStages(
    std::vector<StageFunctions> functions,
    std::vector<Tree> inputs,
    int32_t num_microbatches,
    StageOptions options)
    : num_microbatches_(num_microbatches),
      options_(std::move(options)),
      caller_(std::this_thread::get_id()),
      held_(std::make_unique<Held>()) {
  held_->context = current_context();
  held_->trees.resize(functions.size() * num_microbatches);
  held_->functions = std::move(functions);
  held_->inputs = std::move(inputs);
}

PythonStages::~PythonStages() {
  if (Py_IsInitialized() == 0) {
    static_cast<void>(held_.release());
    return;
  }
  const py::gil_scoped_acquire gil;
  held_.reset();
}

void PythonStages::set_loss(LossFunction loss) {
  held_->loss = std::move(loss);
}

// Puts the arguments together and calls; the output of a stage with lanes comes
// with what it has stashed.
py::object PythonStages::call_function(
    pipe::CellId cell,
    pipe::Phase phase,
    const pipe::Tensors& inputs) {
  const auto& [plain, recomputed, layers] = held_->functions[cell.stage];
  const py::object& function =
      phase == pipe::Phase::kRecomputing ? recomputed : plain;
  std::size_t next = 0;
  py::tuple args;
  py::object kwargs;
  if (cell.stage == 0) {
    const std::vector<Tree>& trees = held_->inputs;
    const Tree& tree = trees[trees.size() == 1 ? 0 : cell.microbatch];
    const py::tuple value = tree.put_together(inputs, next);
    args = value[0];
    kwargs = value[1];
  } else {
    const py::object value =
        tree(cell.stage - 1, cell.microbatch).put_together(inputs, next);
    args = options_.spread && is_several(value) ? py::tuple(value)
                                                : py::make_tuple(value);
  }
  if (layers && layers->size() > 0) {
    return call_layers(
        *layers, options_.first_layers[cell.stage], args, kwargs);
  }
  if (options_.has_lanes[cell.stage]) {
    args = prepend(lane_values(inputs, next), args);
  }
  return bindings::call(function, args, kwargs);
}

pipe::Tensors PythonStages::call(
    pipe::CellId cell,
    pipe::Phase phase,
    const pipe::Tensors& inputs) {
  const py::gil_scoped_acquire gil;
  std::optional<ContextScope> scope;
  if (phase == pipe::Phase::kRecomputing ||
      std::this_thread::get_id() != caller_) {
    scope.emplace(held_->context);
  }
  py::object output = call_function(cell, phase, inputs);
  py::object stashed;
  if (options_.has_lanes[cell.stage]) {
    const py::tuple both = std::move(output);
    output = both[0];
    stashed = both[1];
  }
  const bool last =
      cell.stage + 1 == static_cast<int32_t>(held_->functions.size());
  if (last && held_->loss.function) {
    output = loss_of(cell, output);
  }
  pipe::Tensors tensors;
  Tree tree_of_output =
      Tree::take_apart(output, tensors, {options_.output_depth, nullptr, 0});
  check_stage_output(tree_of_output, output, cell.stage);
  if (stashed) {
    add_lane_tensors(stashed, tensors);
  }
  if (phase != pipe::Phase::kRecomputing) {
    tree(cell.stage, cell.microbatch) = std::move(tree_of_output);
  }
  return tensors;
}

py::object PythonStages::loss_of(pipe::CellId cell, const py::object& output) {
  std::size_t next = 0;
  const py::object targets = held_->loss.target_tree.put_together(
      held_->loss.targets[cell.microbatch], next);
  py::object loss = held_->loss.function(output, targets);
  const bool tensor = THPVariable_Check(loss.ptr());
  if (!tensor || THPVariable_Unpack(loss.ptr()).dim() != 0 ||
      !THPVariable_Unpack(loss.ptr()).is_floating_point()) {
    throw py::type_error(
        "loss: expected a floating-point scalar tensor from loss(output, "
        "targets), got " +
        (tensor ? "shape " + py::str(loss.attr("shape")).cast<std::string>() +
                      ", " + py::str(loss.attr("dtype")).cast<std::string>()
                : py::str(py::type::of(loss).attr("__name__"))
                      .cast<std::string>()));
  }
  return loss;
}

std::shared_ptr<void> PythonStages::enter_backward() noexcept {
  return enter_backward_context(held_->context);
}

void PythonStages::poll() {
  check_signals();
}

bool PythonStages::is_held(const at::Tensor& leaf) noexcept {
  const py::gil_scoped_acquire gil;
  try {
    // A plain static would be waited for with the GIL held, by a thread that
    // its maker may be waiting for.
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Py_ssize_t>
        nobody;
    return references_of(leaf) >
           nobody.call_once_and_store_result(references_of_nobody).get_stored();
  } catch (const std::exception&) {
    PyErr_Clear();
    return true;
  }
}

void PythonStages::forget_failure() noexcept {
  const py::gil_scoped_acquire gil;
  PyErr_Clear();
}

std::vector<Tree> PythonStages::take_output_trees() {
  const auto last = static_cast<int32_t>(held_->functions.size()) - 1;
  std::vector<Tree> result;
  for (int32_t i = 0; i < num_microbatches_; ++i) {
    result.push_back(std::move(tree(last, i)));
  }
  return result;
}

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

}  // namespace pipetransformer::bindings
