// The pipe as autograd sees it: one node per stage and one for the outputs.
//
//   output --> stage K-1 --> ... --> stage 1 --> stage 0     (edges: tokens)
//                 |                    |           |
//            parameters K-1       parameters 1  parameters 0 and inputs
//
// In backward the output's node starts the pipelined backward of all cells and
// never waits. Each stage's node waits for its stage's last cell and then
// returns its parameters' gradients, each once, summed over micro-batches; so
// hooks (DistributedDataParallel's) see them while earlier stages still run.
// Tokens are CPU tensors and stage nodes receive nothing else: autograd runs
// them in the thread that called backward, never on a device thread that a cell
// may need. The wait is bounded by the cells' own work.
#pragma once

#include <memory>
#include <vector>

#include "pipe/pipe_call.h"
#include "pipe/scatter_gather.h"
#include "pipe/worker_pool.h"

namespace pipetransformer::pipe {

struct CallInputs {
  Tensors tensors;  // as the caller gave them
  RowLayout rows;
  std::vector<Tensors> parameters;  // by stage, those that require grad
};

// Gives the gathered outputs that require grad their history. The nodes keep
// the pool alive, so that a backward works after the pipe itself is gone.
// Backward throws std::runtime_error for create_graph=True and when run a
// second time without retain_graph.
Tensors connect(
    std::shared_ptr<WorkerPool> pool,
    std::shared_ptr<PipeCall> call,
    const CallInputs& inputs,
    const Gathered& outputs);

}  // namespace pipetransformer::pipe
