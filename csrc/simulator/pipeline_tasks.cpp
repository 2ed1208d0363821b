#include "simulator/pipeline_tasks.h"

#include <cstddef>

#include "simulator/prefix_tasks.h"

namespace pipetransformer::simulator {

namespace {

using planner::Op;
using planner::OpKind;
using planner::Schedule;
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
      break;
  }
  return stage.weight_grad_ns;
}

class PipelineBuilder {
 public:
  PipelineBuilder(
      TaskGraph& graph,
      const StepCosts& costs,
      const Schedule& schedule,
      const StepOptions& options,
      PipelineTasks& made)
      : graph_(graph),
        costs_(costs),
        schedule_(schedule),
        options_(options),
        devices_(made.devices),
        last_(made.last),
        ops_(schedule.size()) {}

  void build() {
    add_waited_read();
    std::vector<int32_t> arrived;
    if (!fills_gaps(costs_, options_)) {
      arrived = add_prefix(
          graph_,
          costs_,
          options_.prefix == PrefixMode::kSerial,
          devices_,
          last_);
    }
    add_read_ahead();
    add_operations(arrived);
    for (std::size_t j = 0; j < schedule_.size(); ++j) {
      for (std::size_t k = 0; k < schedule_[j].size(); ++k) {
        add_waits(j, k);
      }
    }
  }

 private:
  // All operations before all waits, which point forward and backward.
  void add_operations(const std::vector<int32_t>& arrived) {
    for (std::size_t j = 0; j < schedule_.size(); ++j) {
      for (const Op& op : schedule_[j]) {
        const int32_t task = graph_.add(
            {static_cast<TaskKind>(op.kind),
             devices_.replica,
             static_cast<int32_t>(j),
             op.microbatch,
             Direction::kNone,
             devices_.compute[j],
             devices_.compute_ns(j, duration_of(costs_.stages[j], op.kind))});
        if (last_[j] >= 0) {
          graph_.wait(task, last_[j]);
        }
        last_[j] = task;
        ops_[j].push_back(task);
      }
    }
    if (!ops_[0].empty()) {
      for (const int32_t earlier : arrived) {
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
    copy.resource = forward ? devices_.forward_engine[stage]
                            : devices_.backward_engine[stage];
    copy.duration_ns = copy_ns;
    const int32_t copied = graph_.add(copy);
    graph_.wait(copied, earlier);
    graph_.wait(task, copied);
  }

  // What the devices wait for before they do anything.
  void add_waited_read() {
    if (costs_.cache_wait_ns == 0) {
      return;
    }
    Task task;
    task.kind = TaskKind::kCacheRead;
    task.replica = devices_.replica;
    task.resource = devices_.cache;
    task.duration_ns = costs_.cache_wait_ns;
    const int32_t read = graph_.add(task);
    for (int32_t& last : last_) {
      last = read;  // each list begins with it
    }
  }

  // This one overlaps with everything.
  void add_read_ahead() {
    if (costs_.cache_read_ns == 0) {
      return;
    }
    Task task;
    task.kind = TaskKind::kCacheRead;
    task.replica = devices_.replica;
    task.resource = devices_.cache;
    task.duration_ns = costs_.cache_read_ns;
    graph_.add(task);
  }

  TaskGraph& graph_;
  const StepCosts& costs_;
  const Schedule& schedule_;
  const StepOptions& options_;
  const Devices& devices_;
  std::vector<int32_t>& last_;
  std::vector<std::vector<int32_t>> ops_;  // by stage and place in its list
};

}  // namespace

PipelineTasks add_pipeline(
    TaskGraph& graph,
    const StepCosts& costs,
    const Schedule& schedule,
    const StepOptions& options,
    int32_t replica,
    const Permille& permille) {
  PipelineTasks made{
      add_devices(graph, replica, schedule.size(), permille),
      std::vector<int32_t>(schedule.size(), -1)};
  PipelineBuilder(graph, costs, schedule, options, made).build();
  return made;
}

}  // namespace pipetransformer::simulator
