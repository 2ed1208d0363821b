#include "simulator/step_tasks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "simulator/pipeline_tasks.h"
#include "simulator/prefix_tasks.h"

namespace pipetransformer::simulator {

namespace {

using planner::ScheduleKind;
using planner::StageCosts;
using planner::StepCosts;

// Note [When gradients are reduced]
// GPipe's backward is autograd's: each stage returns its parameters' gradients
// when its part is done, and the reduction hides behind earlier stages. 1F1B
// and ZB-H1 hand all gradients over when the whole step has run. A collective
// waits for its stage on every replica; its part between the nodes takes turns
// with that of other stages on the network card.
std::vector<int32_t> add_all_reduces(
    TaskGraph& graph,
    const StepCosts& costs,
    const std::vector<PipelineTasks>& pipelines) {
  std::vector<int32_t> made;
  const bool at_the_end = costs.schedule != ScheduleKind::kGPipe;
  Task task;
  task.kind = TaskKind::kAllReduce;
  const int32_t network = graph.add_resource(ResourceKind::kNetwork);
  for (std::size_t j = costs.stages.size(); j-- > 0;) {
    if (costs.stages[j].all_reduce_ns == 0) {
      continue;
    }
    task.stage = static_cast<int32_t>(j);
    const int64_t network_ns = costs.stages[j].network_all_reduce_ns;
    task.duration_ns = costs.stages[j].all_reduce_ns - network_ns;
    task.resource = graph.add_resource(ResourceKind::kDeviceLink);
    const int32_t first = graph.add(task);
    for (const PipelineTasks& pipeline : pipelines) {
      for (std::size_t k = 0; k < pipeline.last.size(); ++k) {
        if ((at_the_end || k == j) && pipeline.last[k] >= 0) {
          graph.wait(first, pipeline.last[k]);
        }
      }
    }
    task.duration_ns = network_ns;
    task.resource = network;
    made.push_back(graph.add(task));
    graph.wait(made.back(), first);
  }
  return made;
}

void wait_for_gradients(
    TaskGraph& graph,
    int32_t task,
    const PipelineTasks& pipeline,
    const std::vector<int32_t>& all_reduces) {
  for (const int32_t earlier : pipeline.last) {
    if (earlier >= 0) {
      graph.wait(task, earlier);
    }
  }
  for (const int32_t earlier : all_reduces) {
    graph.wait(task, earlier);
  }
}

// Of the process that drives the pipeline, after the call that runs backward
// has returned: the optimizer, and what else it does.
void add_process(
    TaskGraph& graph,
    const StepCosts& costs,
    const PipelineTasks& pipeline,
    const std::vector<int32_t>& all_reduces) {
  if (costs.process_ns == 0) {
    return;
  }
  Task task;
  task.kind = TaskKind::kOptimizer;
  task.replica = pipeline.devices.replica;
  task.resource = pipeline.devices.compute.front();
  task.duration_ns = pipeline.devices.compute_ns(0, costs.process_ns);
  wait_for_gradients(graph, graph.add(task), pipeline, all_reduces);
}

// In grains as the costs say, else of a quarter of the longest forward; no more
// than 2^16 of them.
FillWork fill_work(const StepCosts& costs, const Devices& devices) {
  FillWork fill;
  fill.total_ns = prefix_per_microbatch_ns(costs) * costs.num_microbatches;
  int64_t longest = 0;
  for (const StageCosts& stage : costs.stages) {
    longest = std::max(longest, stage.forward_ns);
  }
  const int64_t grain_ns =
      costs.prefix_grain_ns > 0 ? costs.prefix_grain_ns : longest / 4;
  fill.grain_ns = std::max({int64_t{1}, grain_ns, (fill.total_ns >> 16) + 1});
  fill.resources = devices.compute;
  return fill;
}

}  // namespace

StepTasks tasks_of_step(
    const StepCosts& costs,
    const planner::Schedule& schedule,
    const std::vector<Permille>& replicas,
    const StepOptions& options) {
  StepTasks step;
  std::vector<PipelineTasks> pipelines;
  for (const Permille& permille : replicas) {
    pipelines.push_back(add_pipeline(
        step.graph,
        costs,
        schedule,
        options,
        static_cast<int32_t>(pipelines.size()),
        permille));
    step.devices.push_back(pipelines.back().devices);
  }
  const std::vector<int32_t> all_reduces =
      add_all_reduces(step.graph, costs, pipelines);
  for (const PipelineTasks& pipeline : pipelines) {
    add_process(step.graph, costs, pipeline, all_reduces);
  }
  if (fills_gaps(costs, options)) {
    step.fill = fill_work(costs, step.devices.front());
  }
  return step;
}

}  // namespace pipetransformer::simulator
