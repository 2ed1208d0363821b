#include "bindings/pipe_stages.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

namespace {

// A tuple or list is spread into positional arguments, else it is the only one.
py::object call_spread(const py::object& function, const py::object& value) {
  if (py::isinstance<py::tuple>(value) || py::isinstance<py::list>(value)) {
    return function(*py::tuple(value));
  }
  return function(value);
}

}  // namespace

PythonStages::PythonStages(
    std::vector<StageFunctions> functions,
    std::vector<Tree> inputs,
    int32_t num_microbatches)
    : functions_(std::move(functions)),
      num_microbatches_(num_microbatches),
      inputs_(std::move(inputs)),
      trees_(functions_.size() * num_microbatches) {}

PythonStages::~PythonStages() {
  const py::gil_scoped_acquire gil;
  inputs_.clear();
  trees_.clear();
  functions_.clear();
}

pipe::Tensors PythonStages::call(
    pipe::CellId cell,
    pipe::Phase phase,
    bool record,
    const pipe::Tensors& inputs) {
  const py::gil_scoped_acquire gil;
  const auto& [plain, checkpointed, recomputed] = functions_[cell.stage];
  const py::object& function =
      phase == pipe::Phase::kRecomputing
          ? recomputed
          : (phase == pipe::Phase::kCheckpointing && record ? checkpointed
                                                            : plain);
  std::size_t next = 0;
  py::object output;
  if (cell.stage == 0) {
    const Tree& tree = inputs_[inputs_.size() == 1 ? 0 : cell.microbatch];
    const py::tuple value = tree.put_together(inputs, next);
    output = function(*py::tuple(value[0]), **py::dict(value[1]));
  } else {
    output = call_spread(
        function,
        tree(cell.stage - 1, cell.microbatch).put_together(inputs, next));
  }
  pipe::Tensors tensors;
  Tree tree_of_output = Tree::take_apart(output, tensors);
  check_stage_output(tree_of_output, output, cell.stage);
  if (phase != pipe::Phase::kRecomputing) {
    tree(cell.stage, cell.microbatch) = std::move(tree_of_output);
  }
  return tensors;
}

void PythonStages::poll() {
  check_signals();
}

void PythonStages::forget_failure() noexcept {
  const py::gil_scoped_acquire gil;
  PyErr_Clear();
}

std::vector<Tree> PythonStages::take_output_trees() {
  const auto last = static_cast<int32_t>(functions_.size()) - 1;
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
