#include "simulator/step.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "planner/schedule/schedules.h"
#include "simulator/memory.h"
#include "simulator/replay.h"
#include "simulator/sharing.h"
#include "simulator/step_tasks.h"

namespace pipetransformer::simulator {

namespace {

using planner::Schedule;
using planner::StepCosts;

void check_lists(const StepCosts& costs, const Schedule& schedule) {
  if (schedule.size() != costs.stages.size()) {
    throw std::invalid_argument(
        "schedule: expected " + std::to_string(costs.stages.size()) +
        " stages, as the costs, got " + std::to_string(schedule.size()));
  }
  planner::check_linked(schedule);
}

std::vector<Event> timeline_of(const StepTasks& tasks, const Replay& replay) {
  std::vector<Event> events;
  for (const Span& span : replay.spans) {
    const Task& task = tasks.graph.tasks()[static_cast<std::size_t>(span.task)];
    events.push_back(
        {task.kind,
         tasks.graph.resource(task.resource),
         task.replica,
         task.stage,
         task.microbatch,
         task.direction,
         span.begin_ns,
         span.end_ns});
  }
  for (const FillSpan& span : replay.fills) {
    const auto& devices = tasks.devices.front().compute;
    const auto at = std::find(devices.begin(), devices.end(), span.resource);
    events.push_back(
        {TaskKind::kPrefix,
         ResourceKind::kCompute,
         0,
         static_cast<int32_t>(at - devices.begin()),
         -1,
         Direction::kNone,
         span.begin_ns,
         span.end_ns});
  }
  std::stable_sort(
      events.begin(), events.end(), [](const Event& a, const Event& b) {
        return std::tie(a.begin_ns, a.replica, a.stage) <
               std::tie(b.begin_ns, b.replica, b.stage);
      });
  return events;
}

// Replicas that are simulated stand for those of a node, each for as many.
Sharing sharing_of(const StepCosts& costs, std::size_t num_simulated) {
  Sharing sharing;
  sharing.cores_permille = costs.cores_permille;
  sharing.replicas_each = std::max<int64_t>(
      1, costs.replicas_per_node / static_cast<int64_t>(num_simulated));
  sharing.reads_compute = costs.cache_read_ns == 0;
  return sharing;
}

class Measured {
 public:
  Measured(
      const StepCosts& costs,
      const Schedule& schedule,
      const StepTasks& tasks,
      const Replay& replay) {
    result_.pipelines.resize(tasks.devices.size());
    for (PipelineResult& pipeline : result_.pipelines) {
      pipeline.begin_ns = -1;
      pipeline.stage_busy_ns.assign(costs.stages.size(), 0);
      pipeline.peak_bytes = peak_bytes(costs, schedule);
    }
    for (const Span& span : replay.spans) {
      add(tasks.graph.tasks()[static_cast<std::size_t>(span.task)], span);
    }
    add_fill(tasks.fill, replay);
    for (PipelineResult& pipeline : result_.pipelines) {
      finish(pipeline);
    }
    result_.exposed_all_reduce_ns =
        std::max<int64_t>(0, all_reduce_end_ns_ - operations_end_ns_);
  }

  StepResult take() {
    return std::move(result_);
  }

 private:
  void add(const Task& task, const Span& span) {
    result_.step_ns = std::max(result_.step_ns, span.end_ns);
    if (task.kind == TaskKind::kAllReduce) {
      all_reduce_end_ns_ = std::max(all_reduce_end_ns_, span.end_ns);
    }
    if (!is_pipeline(task.kind)) {
      return;
    }
    auto& pipeline = result_.pipelines[static_cast<std::size_t>(task.replica)];
    operations_end_ns_ = std::max(operations_end_ns_, span.end_ns);
    pipeline.end_ns = std::max(pipeline.end_ns, span.end_ns);
    if (pipeline.begin_ns < 0 || span.begin_ns < pipeline.begin_ns) {
      pipeline.begin_ns = span.begin_ns;
    }
    pipeline.stage_busy_ns[static_cast<std::size_t>(task.stage)] +=
        span.end_ns - span.begin_ns;
  }

  // Grains that are left are spread over the devices when the step is over and
  // their own last grain has ended.
  void add_fill(const FillWork& fill, const Replay& replay) {
    if (fill.resources.empty()) {
      return;
    }
    std::vector<int64_t> free_ns(fill.resources.size(), result_.step_ns);
    for (const FillSpan& span : replay.fills) {
      const auto at = std::find(
          fill.resources.begin(), fill.resources.end(), span.resource);
      int64_t& free =
          free_ns[static_cast<std::size_t>(at - fill.resources.begin())];
      free = std::max(free, span.end_ns);
    }
    const auto devices = static_cast<int64_t>(free_ns.size());
    int64_t behind =
        replay.fill_left_ns;  // over all devices, the step's end on
    for (const int64_t free : free_ns) {
      behind += free - result_.step_ns;
    }
    result_.step_ns = std::max(
        *std::max_element(free_ns.begin(), free_ns.end()),
        result_.step_ns + (behind + devices - 1) / devices);
  }

  static void finish(PipelineResult& pipeline) {
    const auto span = static_cast<double>(pipeline.end_ns - pipeline.begin_ns);
    double busy = 0;
    for (const int64_t time_ns : pipeline.stage_busy_ns) {
      busy += static_cast<double>(time_ns);
    }
    const auto stages = static_cast<double>(pipeline.stage_busy_ns.size());
    pipeline.bubble_fraction = span > 0 ? 1 - busy / (stages * span) : 0;
  }

  StepResult result_;
  int64_t operations_end_ns_ = 0;
  int64_t all_reduce_end_ns_ = 0;
};

StepResult play(
    const StepCosts& costs,
    const Schedule& schedule,
    const std::vector<Permille>& replicas,
    const StepOptions& options) {
  const StepTasks tasks = tasks_of_step(costs, schedule, replicas, options);
  Replay times = replay(tasks.graph, tasks.fill);
  share_cores(times, tasks, sharing_of(costs, replicas.size()));
  StepResult result = Measured(costs, schedule, tasks, times).take();
  if (options.keep_timeline) {
    result.timeline = timeline_of(tasks, times);
  }
  return result;
}

// A batch before the last of those that share an optimizer step.
StepCosts without_all_reduce(const StepCosts& costs) {
  StepCosts other = costs;
  for (planner::StageCosts& stage : other.stages) {
    stage.all_reduce_ns = 0;
    stage.network_all_reduce_ns = 0;
  }
  return other;
}

}  // namespace

Schedule schedule_of(const StepCosts& costs) {
  planner::ScheduleShape shape;
  shape.num_microbatches = static_cast<int32_t>(costs.num_microbatches);
  shape.num_stages = static_cast<int32_t>(costs.stages.size());
  shape.num_recomputed = static_cast<int32_t>(costs.num_recomputed);
  for (const planner::StageCosts& stage : costs.stages) {
    shape.first_stage += stage.has_backward ? 0 : 1;
  }
  switch (costs.schedule) {
    case planner::ScheduleKind::kGPipe:
      return planner::make_schedule("gpipe", shape);
    case planner::ScheduleKind::kOneFOneB:
      return planner::one_f_one_b(shape);
    case planner::ScheduleKind::kZbH1:
      break;
  }
  return planner::zb_h1(shape);
}

StepResult simulate_step(const StepCosts& costs, bool keep_timeline) {
  StepOptions options;
  options.keep_timeline = keep_timeline;
  return simulate_replicas(costs, {Permille{}}, options);
}

StepResult simulate_replicas(
    const StepCosts& costs,
    const std::vector<Permille>& replicas,
    const StepOptions& options) {
  check(costs, replicas, options);
  return simulate_lists(costs, schedule_of(costs), replicas, options);
}

StepResult simulate_lists(
    const StepCosts& costs,
    const Schedule& schedule,
    const std::vector<Permille>& replicas,
    const StepOptions& options) {
  check(costs, replicas, options);
  check_lists(costs, schedule);
  StepResult result = play(costs, schedule, replicas, options);
  result.last_step_ns = result.step_ns;
  if (costs.accumulation_steps > 1) {
    StepOptions of_others = options;
    of_others.keep_timeline = false;
    const int64_t other_ns =
        play(without_all_reduce(costs), schedule, replicas, of_others).step_ns;
    result.step_ns =
        other_ns + (result.step_ns - other_ns) / costs.accumulation_steps;
  }
  return result;
}

}  // namespace pipetransformer::simulator
