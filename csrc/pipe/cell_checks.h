// What a cell refuses because its gradient would be wrong and nobody would see
// it: changes in place that one memory hides from another history, and tensors
// that require grad and belong to nobody here. No state, thread-safe; every
// check throws std::runtime_error.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pipe/stage_calls.h"

namespace pipetransformer::pipe {

// "stage 1, micro-batch 0"
std::string describe(CellId id);

// Counts changes in place; -1 for tensors that do not count.
int64_t version_of(const at::Tensor& tensor);
std::vector<int64_t> versions_of(const Tensors& tensors);

// In one model a layer behind the stash that changes the tensor in place
// changes what is popped, gradient and all. Past a border it would change the
// value alone, and only where no device lies between.
// `version`: when it was stashed, on stage `source`.
void check_skip_unchanged(
    const at::Tensor& skip,
    int64_t version,
    int32_t source,
    int32_t destination);

// Two inputs of one memory have separate histories: a change of one in place
// would not reach the gradient of the other. `versions`: before the call.
void check_no_shared_change(
    const std::string& cell,
    const Tensors& inputs,
    const std::vector<int64_t>& versions);

// What the graph of a cell leads to.
struct Reached {
  std::vector<bool> parameters;  // of the stage
  // A parameter is reached by more than one edge: its gradient is a sum.
  bool has_sums = false;
};

// Gradients end at a stage's own parameters and inputs; what leads elsewhere
// (another stage's parameter, a tensor kept from an earlier call) would get
// none. A leaf that the layer made in the call, and nobody holds or watches,
// wants none. Walks over the graph of the outputs.
Reached check_own_leaves(
    StageCalls& stages,
    int32_t stage,
    const Tensors& outputs,
    const torch::autograd::edge_list& parameters,
    const torch::autograd::edge_list& inputs);

// The outputs of a recomputation depend on the parameters that those of its
// forward did (`reached`, from above), and carry gradient where they did
// (`carried`, of the same length).
void check_same_leaves(
    StageCalls& stages,
    CellId id,
    const std::vector<bool>& carried,
    const std::vector<bool>& reached,
    const Tensors& outputs,
    const torch::autograd::edge_list& parameters,
    const torch::autograd::edge_list& inputs);

// Whether no parameter of a stage is computed of others, as functional_call may
// have it.
bool all_leaves(const torch::autograd::edge_list& parameters);

// Gradients of a cell are asked for at each parameter, and at one that another
// is computed of what goes through the other would count once more.
void check_independent(
    int32_t stage,
    const torch::autograd::edge_list& parameters);

// Holds a tangent of torch.func, or a dimension of vmap (also of
// torch.autograd.grad(..., is_grads_batched=True)).
bool is_transformed(const at::Tensor& tensor);

// Tangents would be lost where a tensor crosses a border, and threads know
// nothing of transforms.
void check_no_tangents(const Tensors& tensors);

// Autograd refuses to change a leaf that requires grad in place; a micro-batch
// is a view without history, so it cannot. `versions`: before the call.
void check_leaves_unchanged(
    const Tensors& inputs,
    const std::vector<int64_t>& versions);

}  // namespace pipetransformer::pipe
