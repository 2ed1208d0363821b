// GPipe's pipe as autograd sees it: the chain of node_chain.h and one node for
// the outputs.
//
// In backward the output's node starts the pipelined backward of all cells and
// never waits. Each stage's node waits for its stage's last cell and then
// returns its parameters' gradients, each once, summed over micro-batches; so
// hooks (DistributedDataParallel's) see them while earlier stages still run.
// The wait is bounded by the cells' own work.
#pragma once

#include <memory>

#include "pipe/node_chain.h"
#include "pipe/pipe_call.h"
#include "pipe/scatter_gather.h"
#include "pipe/worker_pool.h"
#include "planner/schedule/schedule_cache.h"

namespace pipetransformer::pipe {

// What a backward needs to be queued.
struct Runner {
  std::shared_ptr<WorkerPool> pool;
  std::shared_ptr<planner::ScheduleCache> schedules;
  planner::LinkRules rules;
};

// Gives the gathered outputs that require grad their history. The nodes keep
// the pool alive, so that a backward works after the pipe itself is gone.
// Backward throws std::runtime_error for create_graph=True and when run a
// second time without retain_graph.
Tensors connect(
    Runner runner,
    std::shared_ptr<PipeCall> call,
    const ChainPlan& plan,
    const Gathered& outputs);

}  // namespace pipetransformer::pipe
