// The Python structure around the tensors of a stage's inputs and outputs:
// nested tuples, lists and dicts with tensors or other values at the leaves.
// Everything here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <climits>
#include <string>
#include <vector>

namespace pipetransformer::bindings {

// A tensor that every micro-batch gets whole (Python's NoChunk).
struct NoChunk {
  at::Tensor tensor;
};

// How far a structure is taken apart.
struct Opening {
  // Containers at this depth and below are one value; strict mode leaves them
  // to the user's layers.
  int depth = INT_MAX;
  // Filled in step with the tensors: which came as NoChunk. Null: a NoChunk is
  // one value.
  std::vector<bool>* whole = nullptr;
  int level = 0;  // containers around the value
};

// A structure without its tensors. Tuples (named ones included), lists and
// dicts (also OrderedDict and defaultdict) are taken apart; an instance of any
// other class is one value.
class Tree {
 public:
  // Takes `value` apart and appends its tensors to `tensors`, in order.
  static Tree take_apart(
      const pybind11::handle& value,
      std::vector<at::Tensor>& tensors,
      const Opening& opening = {});

  // Puts the structure together; `next` walks over the tensors.
  pybind11::object
  put_together(const std::vector<at::Tensor>& tensors, std::size_t& next) const;

  // Name of a class of mappings that hold tensors and are one value; empty:
  // there is none. Such tensors would go whole to every micro-batch.
  std::string whole_mapping() const;

  // The same structure at the same places; other values may differ.
  bool matches(const Tree& other) const;

  // Throws py::type_error unless all trees match the first.
  static void check_same(const std::vector<Tree>& trees);

  // As put_together, over several micro-batches' trees: other values become
  // lists with one entry per micro-batch. A list at the top becomes a tuple.
  static pybind11::object gather(
      const std::vector<Tree>& trees,
      const std::vector<at::Tensor>& tensors);

  // gather() of a single micro-batch's output, taken apart on the spot. Throws
  // py::type_error without a tensor in it, std::runtime_error for 0-dim ones.
  static pybind11::object
  gather_one(const pybind11::handle& value, const Opening& opening);

  bool has_tensor() const;

 private:
  enum class Kind : uint8_t { kTensor, kValue, kTuple, kList, kDict };

  static pybind11::object gather_at(
      const std::vector<const Tree*>& trees,
      const std::vector<at::Tensor>& tensors,
      std::size_t& next);
  pybind11::object build(std::vector<pybind11::object> children) const;

  Kind kind_ = Kind::kValue;
  pybind11::object value_;  // kValue: it; kTuple: its type; kDict: its keys
  pybind11::object empty_;  // kDict: an empty one of its kind; null: a dict
  std::vector<Tree> children_;
};

// Throws py::type_error when a stage's output holds no tensor.
void check_stage_output(
    const Tree& tree,
    const pybind11::handle& value,
    int32_t stage);

}  // namespace pipetransformer::bindings
