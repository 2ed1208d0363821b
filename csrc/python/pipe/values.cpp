#include "python/pipe/values.h"

#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "pipe/scatter_gather.h"

namespace pipetransformer::bindings {

namespace py = pybind11;

namespace {

constexpr int kDeepest = 100;

// An empty dict of the same kind, which keeps an order or a default; null: of
// a class of the user's, or a dict.
py::object emptied(const py::handle& value) {
  const auto collections = py::module_::import("collections");
  const py::type type = py::type::of(value);
  if (type.is(collections.attr("OrderedDict"))) {
    return type();
  }
  if (type.is(collections.attr("defaultdict"))) {
    return type(value.attr("default_factory"));
  }
  return {};
}

bool is_mapping(const py::handle& value) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> kind;
  return py::isinstance(
      value,
      kind.call_once_and_store_result([]() -> py::object {
            return py::module_::import("collections.abc").attr("Mapping");
          })
          .get_stored());
}

bool holds_tensor(const py::handle& value, int level) {
  if (THPVariable_Check(value.ptr())) {
    return true;
  }
  if (level > kDeepest) {
    return false;
  }
  const bool maps = is_mapping(value);
  if (!maps && !PyTuple_Check(value.ptr()) && !PyList_Check(value.ptr())) {
    return false;
  }
  for (const py::handle item :
       maps ? value.attr("values")()
            : py::reinterpret_borrow<py::object>(value)) {
    if (holds_tensor(item, level + 1)) {
      return true;
    }
  }
  return false;
}

bool is_named_tuple(const py::handle& value) {
  return !PyTuple_CheckExact(value.ptr()) && py::hasattr(value, "_fields");
}

}  // namespace

Tree Tree::take_apart(
    const py::handle& value,
    std::vector<at::Tensor>& tensors,
    const Opening& opening) {
  Tree tree;
  if (THPVariable_Check(value.ptr())) {
    tree.kind_ = Kind::kTensor;
    tensors.push_back(THPVariable_Unpack(value.ptr()));
    if (opening.whole != nullptr) {
      opening.whole->push_back(false);
    }
    return tree;
  }
  if (opening.level > kDeepest) {
    throw py::value_error(
        "nested value: expected at most " + std::to_string(kDeepest) +
        " levels of containers, got more (one that holds itself?)");
  }
  const Opening inner{opening.depth - 1, opening.whole, opening.level + 1};
  const bool opens = opening.depth > 0;
  if (opens && (PyTuple_CheckExact(value.ptr()) ||
                (PyTuple_Check(value.ptr()) && is_named_tuple(value)))) {
    tree.kind_ = Kind::kTuple;
    tree.value_ = py::type::of(value);
    for (const py::handle item : py::reinterpret_borrow<py::tuple>(value)) {
      tree.children_.push_back(take_apart(item, tensors, inner));
    }
  } else if (opens && PyList_CheckExact(value.ptr())) {
    tree.kind_ = Kind::kList;
    for (const py::handle item : py::reinterpret_borrow<py::list>(value)) {
      tree.children_.push_back(take_apart(item, tensors, inner));
    }
  } else if (
      opens &&
      (PyDict_CheckExact(value.ptr()) ||
       (PyDict_Check(value.ptr()) && (tree.empty_ = emptied(value))))) {
    tree.kind_ = Kind::kDict;
    py::list keys;
    // An OrderedDict has an order of its own.
    const py::object items = tree.empty_ ? value.attr("items")() : py::object();
    if (items) {
      for (const py::handle item : items) {
        const auto pair = py::reinterpret_borrow<py::tuple>(item);
        keys.append(pair[0]);
        tree.children_.push_back(take_apart(pair[1], tensors, inner));
      }
    } else {
      for (const auto& item : py::reinterpret_borrow<py::dict>(value)) {
        keys.append(item.first);
        tree.children_.push_back(take_apart(item.second, tensors, inner));
      }
    }
    tree.value_ = std::move(keys);
  } else if (opening.whole != nullptr && py::isinstance<NoChunk>(value)) {
    tree.kind_ = Kind::kTensor;
    tensors.push_back(value.cast<const NoChunk&>().tensor);
    opening.whole->push_back(true);
  } else {
    tree.value_ = py::reinterpret_borrow<py::object>(value);
  }
  return tree;
}

py::object Tree::build(std::vector<py::object> children) const {
  if (kind_ == Kind::kDict) {
    // A copy: a default factory stays, and so do later ones of the caller's.
    py::object result = empty_ ? empty_.attr("copy")() : py::dict();
    for (std::size_t k = 0; k < children.size(); ++k) {
      result[value_[py::int_(k)]] = children[k];
    }
    return result;
  }
  if (kind_ == Kind::kList) {
    py::list result(children.size());
    for (std::size_t k = 0; k < children.size(); ++k) {
      result[k] = std::move(children[k]);
    }
    return result;
  }
  py::tuple result(children.size());
  for (std::size_t k = 0; k < children.size(); ++k) {
    result[k] = std::move(children[k]);
  }
  const bool plain = value_.ptr() == reinterpret_cast<PyObject*>(&PyTuple_Type);
  return plain ? py::object(std::move(result)) : value_(*result);
}

py::object Tree::put_together(
    const std::vector<at::Tensor>& tensors,
    std::size_t& next) const {
  if (kind_ == Kind::kTensor) {
    return py::cast(tensors.at(next++));
  }
  if (kind_ == Kind::kValue) {
    return value_;
  }
  std::vector<py::object> children;
  children.reserve(children_.size());
  for (const Tree& child : children_) {
    children.push_back(child.put_together(tensors, next));
  }
  return build(std::move(children));
}

bool Tree::matches(const Tree& other) const {
  if (kind_ != other.kind_ || children_.size() != other.children_.size()) {
    return false;
  }
  if (kind_ == Kind::kDict && !value_.equal(other.value_)) {
    return false;
  }
  if (kind_ == Kind::kTuple && !value_.is(other.value_)) {
    return false;
  }
  for (std::size_t k = 0; k < children_.size(); ++k) {
    if (!children_[k].matches(other.children_[k])) {
      return false;
    }
  }
  return true;
}

std::string Tree::whole_mapping() const {
  if (kind_ == Kind::kValue && value_ && is_mapping(value_) &&
      holds_tensor(value_, 0)) {
    return py::str(py::type::of(value_).attr("__name__"));
  }
  for (const Tree& child : children_) {
    if (std::string name = child.whole_mapping(); !name.empty()) {
      return name;
    }
  }
  return {};
}

bool Tree::has_tensor() const {
  if (kind_ == Kind::kTensor) {
    return true;
  }
  for (const Tree& child : children_) {
    if (child.has_tensor()) {
      return true;
    }
  }
  return false;
}

py::object Tree::gather_at(
    const std::vector<const Tree*>& trees,
    const std::vector<at::Tensor>& tensors,
    std::size_t& next) {
  const Tree& first = *trees.front();
  if (first.kind_ == Kind::kTensor) {
    return py::cast(tensors.at(next++));
  }
  // A structure that holds no tensor is one value, listed as a whole.
  if (!first.has_tensor()) {
    py::list values;
    for (const Tree* tree : trees) {
      std::size_t none = 0;
      values.append(tree->put_together({}, none));
    }
    return values;
  }
  std::vector<py::object> children;
  for (std::size_t k = 0; k < first.children_.size(); ++k) {
    std::vector<const Tree*> parts;
    for (const Tree* tree : trees) {
      parts.push_back(&tree->children_[k]);
    }
    children.push_back(gather_at(parts, tensors, next));
  }
  return first.build(std::move(children));
}

void Tree::check_same(const std::vector<Tree>& trees) {
  for (const Tree& tree : trees) {
    if (!tree.matches(trees.front())) {
      throw py::type_error(
          "outputs of the last stage: expected the same kinds of values from "
          "every micro-batch, got different ones");
    }
  }
}

py::object Tree::gather_one(const py::handle& value, const Opening& opening) {
  std::vector<at::Tensor> tensors;
  std::vector<Tree> trees;
  trees.push_back(take_apart(value, tensors, opening));
  check_stage_output(trees.front(), value, 0);
  for (std::size_t p = 0; p < tensors.size(); ++p) {
    pipe::check_has_rows(tensors[p], p);
  }
  return gather(trees, tensors);
}

void check_stage_output(
    const Tree& tree,
    const py::handle& value,
    int32_t stage) {
  if (!tree.has_tensor()) {
    throw py::type_error(
        "output of stage " + std::to_string(stage) +
        ": expected at least one tensor, got " +
        std::string(py::str(py::type::of(value).attr("__name__"))) +
        "; tensors may come in tuples, lists and plain dicts");
  }
}

py::object Tree::gather(
    const std::vector<Tree>& trees,
    const std::vector<at::Tensor>& tensors) {
  std::vector<const Tree*> parts;
  for (const Tree& tree : trees) {
    parts.push_back(&tree);
  }
  std::size_t next = 0;
  py::object result = gather_at(parts, tensors, next);
  return PyList_CheckExact(result.ptr()) ? py::object(py::tuple(result))
                                         : result;
}

}  // namespace pipetransformer::bindings
