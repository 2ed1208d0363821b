#include "pipe/cell_checks.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <typeinfo>
#include <unordered_set>
#include <utility>

#include "pipe/border_node.h"

namespace pipetransformer::pipe {

std::string describe(CellId id) {
  return "stage " + std::to_string(id.stage) + ", micro-batch " +
         std::to_string(id.microbatch);
}

int64_t version_of(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.is_inference()
             ? -1
             : static_cast<int64_t>(tensor._version());
}

std::vector<int64_t> versions_of(const Tensors& tensors) {
  std::vector<int64_t> versions;
  versions.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(version_of(tensor));
  }
  return versions;
}

void check_skip_unchanged(
    const at::Tensor& skip,
    int64_t version,
    int32_t source,
    int32_t destination) {
  if (version_of(skip) != version) {
    throw std::runtime_error(
        "skip tensor from stage " + std::to_string(source) + " to stage " +
        std::to_string(destination) +
        ": expected to be unchanged between stash and pop, got an in-place "
        "change by a layer in between; use an out-of-place operation");
  }
}

void check_no_shared_change(
    const std::string& cell,
    const Tensors& inputs,
    const std::vector<int64_t>& versions) {
  for (std::size_t p = 0; p < inputs.size(); ++p) {
    if (version_of(inputs[p]) == versions[p]) {
      continue;
    }
    for (std::size_t q = 0; q < inputs.size(); ++q) {
      if (q != p && inputs[q].defined() && inputs[q].has_storage() &&
          inputs[p].has_storage() && inputs[q].is_alias_of(inputs[p])) {
        throw std::runtime_error(
            "inputs " + std::to_string(p) + " and " + std::to_string(q) +
            " of " + cell +
            ": expected no in-place change of inputs that share memory, got "
            "one; use an out-of-place operation");
      }
    }
  }
}

namespace {

// A leaf of others, or what another cell has made.
bool is_foreign(StageCalls& stages, const torch::autograd::Node* node) {
  using torch::autograd::AccumulateGrad;
  if (!node->next_edges().empty()) {
    return typeid(*node) == typeid(BorderNode);  // less than a cast, per node
  }
  if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(node)) {
    const at::Tensor& made = leaf->variable;
    const bool watched =
        !torch::autograd::impl::hooks(made).empty() ||
        torch::autograd::impl::post_acc_grad_hooks(made) != nullptr ||
        !leaf->pre_hooks().empty() || !leaf->post_hooks().empty();
    return watched || stages.is_held(made);
  }
  return false;
}

// None if the outputs also lead to what is foreign.
std::optional<Reached> reached_parameters(
    StageCalls& stages,
    const Tensors& outputs,
    const torch::autograd::edge_list& parameters,
    const torch::autograd::edge_list& inputs) {
  // The stage's own nodes, at which the walk ends, and others that it has seen.
  enum class Met { kNotYet, kOnce, kAgain, kOther };
  ska::flat_hash_map<const torch::autograd::Node*, Met> nodes;
  nodes.reserve(2 * (parameters.size() + inputs.size() + outputs.size()));
  for (const auto* edges : {&parameters, &inputs}) {
    for (const auto& edge : *edges) {
      nodes.emplace(edge.function.get(), Met::kNotYet);
    }
  }
  std::vector<const torch::autograd::Node*> open;
  open.reserve(nodes.bucket_count());
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      open.push_back(
          torch::autograd::impl::gradient_edge(output).function.get());
    }
  }
  Reached reached;
  while (!open.empty()) {
    const torch::autograd::Node* node = open.back();
    open.pop_back();
    if (node == nullptr) {
      continue;
    }
    const auto [met, is_new] = nodes.emplace(node, Met::kOther);
    if (!is_new) {
      if (met->second != Met::kOther) {
        met->second = met->second == Met::kNotYet ? Met::kOnce : Met::kAgain;
      }
      continue;
    }
    if (is_foreign(stages, node)) {
      return std::nullopt;
    }
    for (const auto& edge : node->next_edges()) {
      open.push_back(edge.function.get());
    }
  }
  reached.parameters.reserve(parameters.size());
  for (const auto& edge : parameters) {
    const Met met = nodes.at(edge.function.get());
    reached.parameters.push_back(met != Met::kNotYet);
    reached.has_sums |= met == Met::kAgain;
  }
  return reached;
}

// Layers that FSDP shards compute with other parameters than they have.
bool any_subclass(const torch::autograd::edge_list& parameters) {
  using torch::autograd::AccumulateGrad;
  return std::any_of(
      parameters.begin(), parameters.end(), [](const auto& edge) {
        const auto* leaf =
            dynamic_cast<const AccumulateGrad*>(edge.function.get());
        return leaf != nullptr &&
               leaf->variable.key_set().has(c10::DispatchKey::Python);
      });
}

}  // namespace

Reached check_own_leaves(
    StageCalls& stages,
    int32_t stage,
    const Tensors& outputs,
    const torch::autograd::edge_list& parameters,
    const torch::autograd::edge_list& inputs) {
  auto reached = reached_parameters(stages, outputs, parameters, inputs);
  if (!reached) {
    throw std::runtime_error(
        "stage " + std::to_string(stage) +
        ": expected every tensor that requires grad to be a parameter of the "
        "stage or an input of it, got one from elsewhere; it would get no "
        "gradient (make it a parameter of the layer, pass it on, or detach "
        "it; a leaf that the layer makes itself must not outlive the call, nor "
        "have hooks" +
        (any_subclass(parameters)
             ? "; parameters of a Tensor subclass, as FSDP has them: call "
               "fully_shard on the pipe, not on its layers)"
             : ")"));
  }
  return *std::move(reached);
}

void check_same_leaves(
    StageCalls& stages,
    CellId id,
    const std::vector<bool>& carried,
    const std::vector<bool>& reached,
    const Tensors& outputs,
    const torch::autograd::edge_list& parameters,
    const torch::autograd::edge_list& inputs) {
  const auto again = reached_parameters(stages, outputs, parameters, inputs);
  bool same = again && again->parameters == reached;
  for (std::size_t p = 0; p < outputs.size(); ++p) {
    same = same && (!carried[p] ||
                    (outputs[p].defined() && outputs[p].requires_grad()));
  }
  if (!same) {
    throw std::runtime_error(
        "recomputation of " + describe(id) +
        ": expected the parameters of its forward, got others, or some that no "
        "longer require grad (torch.func.functional_call puts its own in for "
        "the forward alone; a layer may take another way by a buffer or by "
        "Python's random numbers); use checkpoint='never'");
  }
}

bool all_leaves(const torch::autograd::edge_list& parameters) {
  return std::all_of(
      parameters.begin(), parameters.end(), [](const auto& edge) {
        return edge.function->next_edges().empty();
      });
}

void check_independent(
    int32_t stage,
    const torch::autograd::edge_list& parameters) {
  std::unordered_set<const torch::autograd::Node*> own;
  std::vector<const torch::autograd::Node*> open;
  for (const auto& edge : parameters) {
    own.insert(edge.function.get());
    for (const auto& below : edge.function->next_edges()) {
      open.push_back(below.function.get());
    }
  }
  std::unordered_set<const torch::autograd::Node*> seen;
  while (!open.empty()) {
    const torch::autograd::Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) {
      continue;
    }
    if (own.count(node) != 0) {
      throw std::runtime_error(
          "stage " + std::to_string(stage) +
          ": expected parameters that are not computed of one another, got one "
          "that is (torch.func.functional_call); its gradient would count "
          "twice. Give the stage leaves, or detach() what is computed");
    }
    for (const auto& below : node->next_edges()) {
      open.push_back(below.function.get());
    }
  }
}

bool is_transformed(const at::Tensor& tensor) {
  return tensor.key_set().has_any(c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::Batched}));
}

void check_no_tangents(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      continue;
    }
    const bool transformed = is_transformed(tensor);
    if (transformed || tensor._fw_grad(/*level=*/0).defined()) {
      throw std::runtime_error(
          "pipe: expected inputs and parameters without a tangent or a "
          "dimension of vmap, got one " +
          std::string(
              transformed ? "of a transform of torch.func"
                          : "of forward-mode differentiation") +
          "; a pipe supports reverse mode alone");
    }
  }
}

void check_leaves_unchanged(
    const Tensors& inputs,
    const std::vector<int64_t>& versions) {
  for (std::size_t p = 0; p < inputs.size(); ++p) {
    if (inputs[p].requires_grad() && inputs[p].is_leaf() &&
        version_of(inputs[p]) != versions[p]) {
      throw std::runtime_error(
          "input " + std::to_string(p) +
          ": expected to be left as it is, got an in-place change: a leaf "
          "Variable that requires grad is being used in an in-place "
          "operation");
    }
  }
}

}  // namespace pipetransformer::pipe
