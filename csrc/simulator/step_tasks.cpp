#include "simulator/step_tasks.h"

#include <algorithm>

#include "simulator/prefix_tasks.h"

namespace pipetransformer::simulator {

namespace {

using planner::Op;
using planner::OpKind;
using planner::Schedule;
using planner::ScheduleKind;
using planner::StageCosts;
using planner::StepCosts;

int64_t duration_of(const StageCosts& stage, OpKind kind) {
  switch (kind) {
    case OpKind::kForward:
      return stage.forward_ns;
    case OpKind::kRecompute:
      return stage.recompute_ns;
    case OpKind::kBackward:
      return stage.input_grad_ns + stage.weight_grad_ns;
    case OpKind::kInputGrad:
      return stage.input_grad_ns;
    case OpKind::kWeightGrad:
      return stage.weight_grad_ns;
  }
  return 0;
}

// The tasks of one replica's pipeline.
class PipelineBuilder {
 public:
  PipelineBuilder(
      TaskGraph& graph,
      const StepCosts& costs,
      const Schedule& schedule,
      const StepOptions& options,
      int32_t replica)
      : graph_(graph),
        costs_(costs),
        schedule_(schedule),
        options_(options),
        ops_(schedule.size()),
        last_(schedule.size(), -1) {
    resources_.replica = replica;
    resources_.cache = graph.add_resource(ResourceKind::kCache);
    for (std::size_t j = 0; j < schedule.size(); ++j) {
      resources_.compute.push_back(graph.add_resource(ResourceKind::kCompute));
      resources_.forward_engine.push_back(
          graph.add_resource(ResourceKind::kCopyEngine));
      resources_.backward_engine.push_back(
          graph.add_resource(ResourceKind::kCopyEngine));
    }
  }

  void build() {
    if (options_.prefix != PrefixMode::kFilled) {
      arrived_ = add_prefix(
          graph_,
          costs_,
          options_.prefix == PrefixMode::kSerial,
          resources_,
          last_);
    }
    add_cache_traffic();
    add_operations();
    for (std::size_t j = 0; j < schedule_.size(); ++j) {
      for (std::size_t k = 0; k < schedule_[j].size(); ++k) {
        add_waits(j, k);
      }
    }
  }

  // Last task on each device, -1 for none.
  const std::vector<int32_t>& last() const {
    return last_;
  }
  const ReplicaResources& resources() const {
    return resources_;
  }

 private:
  // All operations first: waits point forward and backward.
  void add_operations() {
    for (std::size_t j = 0; j < schedule_.size(); ++j) {
      for (const Op& op : schedule_[j]) {
        const int32_t task = graph_.add(
            {static_cast<TaskKind>(op.kind),
             resources_.replica,
             static_cast<int32_t>(j),
             op.microbatch,
             Direction::kNone,
             resources_.compute[j],
             duration_of(costs_.stages[j], op.kind)});
        if (last_[j] >= 0) {
          graph_.wait(task, last_[j]);
        }
        last_[j] = task;
        ops_[j].push_back(task);
      }
    }
    if (!ops_[0].empty()) {
      for (const int32_t earlier : arrived_) {
        graph_.wait(ops_[0].front(), earlier);
      }
    }
  }

  void add_waits(std::size_t stage, std::size_t index) {
    const Op& op = schedule_[stage][index];
    const int32_t task = ops_[stage][index];
    for (const planner::StageProgress& wait : op.waits) {
      const auto from = static_cast<std::size_t>(wait.stage);
      const int32_t earlier =
          ops_[from][static_cast<std::size_t>(wait.count) - 1];
      if (from < stage) {
        bring(task, earlier, costs_.stages[from].forward_copy_ns);
      } else if (op.kind != OpKind::kForward) {
        bring(task, earlier, costs_.stages[from].backward_copy_ns);
      } else if (options_.at_most_one_ahead) {
        graph_.wait(task, earlier);
      }
    }
  }

  // `task` waits for what `earlier` made on another device.
  void bring(int32_t task, int32_t earlier, int64_t copy_ns) {
    if (copy_ns == 0) {
      graph_.wait(task, earlier);
      return;
    }
    Task copy = graph_.tasks()[static_cast<std::size_t>(task)];
    const bool forward = copy.kind == TaskKind::kForward;
    const auto stage = static_cast<std::size_t>(copy.stage);
    copy.kind = TaskKind::kCopy;
    copy.direction = forward ? Direction::kForward : Direction::kBackward;
    copy.resource = forward ? resources_.forward_engine[stage]
                            : resources_.backward_engine[stage];
    copy.duration_ns = copy_ns;
    const int32_t copied = graph_.add(copy);
    graph_.wait(copied, earlier);
    graph_.wait(task, copied);
  }

  void add_cache_traffic() {
    if (costs_.cache_read_ns > 0) {
      graph_.add(
          {TaskKind::kCacheRead,
           resources_.replica,
           0,
           -1,
           Direction::kNone,
           resources_.cache,
           costs_.cache_read_ns});
    }
    const auto count = static_cast<int64_t>(arrived_.size());
    for (int64_t i = 0; i < count && options_.cache_write_ns > 0; ++i) {
      const int64_t until = options_.cache_write_ns / count * (i + 1) +
                            options_.cache_write_ns % count * (i + 1) / count;
      const int64_t from = options_.cache_write_ns / count * i +
                           options_.cache_write_ns % count * i / count;
      const int32_t task = graph_.add(
          {TaskKind::kCacheWrite,
           resources_.replica,
           0,
           static_cast<int32_t>(i),
           Direction::kNone,
           resources_.cache,
           until - from});
      graph_.wait(task, arrived_[static_cast<std::size_t>(i)]);
    }
  }

  TaskGraph& graph_;
  const StepCosts& costs_;
  const Schedule& schedule_;
  const StepOptions& options_;
  ReplicaResources resources_;
  std::vector<std::vector<int32_t>> ops_;  // by stage and place in its list
  std::vector<int32_t> last_;
  std::vector<int32_t> arrived_;
};

// Note [When gradients are reduced]
// GPipe's backward is autograd's: each stage returns its parameters' gradients
// when its part is done, and the reduction hides behind earlier stages. 1F1B
// and ZB-H1 hand all gradients over when the whole step has run. A collective
// waits for its stage on every replica.
std::vector<int32_t> add_all_reduces(
    TaskGraph& graph,
    const std::vector<StepCosts>& replicas,
    const std::vector<PipelineBuilder>& pipelines,
    const StepOptions& options) {
  std::vector<int32_t> tasks;
  const bool at_the_end = replicas[0].schedule != ScheduleKind::kGPipe;
  int32_t network = graph.add_resource(ResourceKind::kNetwork);
  const std::size_t num_stages = replicas[0].stages.size();
  for (std::size_t j = num_stages; j-- > 0;) {
    int64_t time_ns = 0;
    for (const StepCosts& costs : replicas) {
      time_ns = std::max(time_ns, costs.stages[j].all_reduce_ns);
    }
    if (time_ns == 0) {
      continue;
    }
    if (!options.shared_network) {
      network = graph.add_resource(ResourceKind::kNetwork);
    }
    const int32_t task = graph.add(
        {TaskKind::kAllReduce,
         0,
         static_cast<int32_t>(j),
         -1,
         Direction::kNone,
         network,
         time_ns});
    for (const PipelineBuilder& pipeline : pipelines) {
      for (std::size_t k = 0; k < num_stages; ++k) {
        if ((at_the_end || k == j) && pipeline.last()[k] >= 0) {
          graph.wait(task, pipeline.last()[k]);
        }
      }
    }
    tasks.push_back(task);
  }
  return tasks;
}

// After the call that runs backward has returned.
void add_optimizer(
    TaskGraph& graph,
    const PipelineBuilder& pipeline,
    const std::vector<int32_t>& all_reduces,
    const StepOptions& options) {
  const ReplicaResources& resources = pipeline.resources();
  for (std::size_t j = 0; j < options.optimizer_ns.size(); ++j) {
    const int32_t task = graph.add(
        {TaskKind::kOptimizer,
         resources.replica,
         static_cast<int32_t>(j),
         -1,
         Direction::kNone,
         resources.compute[j],
         options.optimizer_ns[j]});
    for (const int32_t earlier : pipeline.last()) {
      if (earlier >= 0) {
        graph.wait(task, earlier);
      }
    }
    for (const int32_t earlier : all_reduces) {
      graph.wait(task, earlier);
    }
  }
}

// A quarter of the longest forward, and no more than 2^16 grains.
FillWork fill_work(
    const std::vector<StepCosts>& replicas,
    const std::vector<std::vector<int32_t>>& compute) {
  FillWork fill;
  const StepCosts& costs = replicas[0];
  fill.total_ns = prefix_per_microbatch_ns(costs) * costs.num_microbatches;
  int64_t longest = 0;
  for (const StageCosts& stage : costs.stages) {
    longest = std::max(longest, stage.forward_ns);
  }
  fill.grain_ns =
      std::max({int64_t{1}, longest / 4, (fill.total_ns >> 16) + 1});
  fill.resources = compute[0];
  return fill;
}

}  // namespace

StepTasks tasks_of_step(
    const std::vector<StepCosts>& replicas,
    const Schedule& schedule,
    const StepOptions& options) {
  StepTasks result;
  TaskGraph& graph = result.graph;
  std::vector<PipelineBuilder> pipelines;
  pipelines.reserve(replicas.size());
  for (const StepCosts& costs : replicas) {
    pipelines.emplace_back(
        graph,
        costs,
        schedule,
        options,
        static_cast<int32_t>(pipelines.size()));
    pipelines.back().build();
    result.compute.push_back(pipelines.back().resources().compute);
  }
  const std::vector<int32_t> all_reduces =
      add_all_reduces(graph, replicas, pipelines, options);
  for (const PipelineBuilder& pipeline : pipelines) {
    add_optimizer(graph, pipeline, all_reduces, options);
  }
  if (options.prefix == PrefixMode::kFilled) {
    result.fill = fill_work(replicas, result.compute);
  }
  return result;
}

}  // namespace pipetransformer::simulator
