// The chain of autograd nodes, one per stage, that a pipe shows to autograd:
//
//   output --> stage K-1 --> ... --> stage 1 --> stage 0     (edges: tokens)
//                 |                    |           |
//            parameters K-1       parameters 1  parameters 0 and inputs
//
// Tokens are CPU tensors and stage nodes receive nothing else: autograd runs
// them in the thread that called backward, never on a device thread that a cell
// may need.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "pipe/cell_backward.h"
#include "pipe/node_ptr.h"
#include "pipe/scatter_gather.h"

namespace pipetransformer::pipe {

struct CallInputs {
  Tensors tensors;  // as the caller gave them
  RowLayout rows;
  std::vector<Tensors> parameters;  // by stage, those that require grad
};

// The inputs that carry gradient.
struct CarryingInputs {
  Tensors tensors;
  RowLayout rows;
  std::vector<std::size_t> positions;
};

struct ChainPlan {
  std::shared_ptr<const BackwardPlan> backward;
  CarryingInputs inputs;
};

// BackwardPlan::first_stage is the number of stages when nothing requires grad.
ChainPlan plan_chain(const CallInputs& inputs);

// Throws std::runtime_error when there is no such stage, although an output
// requires grad.
void check_has_stage(const BackwardPlan& plan);

// `make` is called for each stage from the lowest with a backward on. Edges of
// its node: the token of the stage below (not for the lowest), the parameters,
// and for the lowest the inputs. Returns the last stage's token.
at::Tensor chain_nodes(
    const ChainPlan& plan,
    const std::function<NodePtr(int32_t stage, bool lowest)>& make);

at::Tensor make_token();

// A tensor with the same data whose history is output `node`.
at::Tensor with_history(const at::Tensor& tensor, const NodePtr& node);

// Throws std::runtime_error: a backward with create_graph=True.
void refuse_double_backward();
[[noreturn]] void refuse_second_backward();

}  // namespace pipetransformer::pipe
