#include "simulator/step.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

#include "planner/schedules.h"
#include "simulator/memory.h"
#include "simulator/replay.h"
#include "simulator/step_tasks.h"

namespace pipetransformer::simulator {

namespace {

using planner::Schedule;
using planner::StepCosts;

[[noreturn]] void refuse(
    const std::string& what,
    const std::string& expected,
    const std::string& got) {
  throw std::invalid_argument(what + ": expected " + expected + ", got " + got);
}

std::string shape_of(const StepCosts& costs) {
  return std::to_string(costs.stages.size()) + " stages and " +
         std::to_string(costs.num_microbatches) + " micro-batches of which " +
         std::to_string(costs.num_recomputed) + " are recomputed";
}

void check_alike(
    const std::vector<StepCosts>& replicas,
    const StepOptions& options) {
  if (replicas.empty()) {
    refuse("step costs", "at least 1 replica", "none");
  }
  for (const StepCosts& costs : replicas) {
    check(costs, options);
    if (costs.schedule != replicas[0].schedule ||
        shape_of(costs) != shape_of(replicas[0])) {
      refuse(
          "step costs of a replica",
          "the first one's schedule with " + shape_of(replicas[0]),
          shape_of(costs));
    }
  }
  if (replicas.size() > 1 && options.prefix == PrefixMode::kFilled) {
    refuse(
        "prefix in the pipeline's gaps",
        "1 replica",
        std::to_string(replicas.size()));
  }
}

void check_lists(const StepCosts& costs, const Schedule& schedule) {
  if (schedule.size() != costs.stages.size()) {
    refuse(
        "schedule",
        std::to_string(costs.stages.size()) + " stages, as the costs",
        std::to_string(schedule.size()));
  }
  planner::check_linked(schedule);
}

std::vector<Event> timeline_of(const StepTasks& tasks, const Replay& replay) {
  std::vector<Event> events;
  for (const Span& span : replay.spans) {
    const Task& task = tasks.graph.tasks()[static_cast<std::size_t>(span.task)];
    events.push_back(
        {task.kind,
         task.replica,
         task.stage,
         task.microbatch,
         task.direction,
         span.begin_ns,
         span.end_ns});
  }
  for (const FillSpan& span : replay.fills) {
    const auto& devices = tasks.compute[0];
    const auto at = std::find(devices.begin(), devices.end(), span.resource);
    events.push_back(
        {TaskKind::kPrefix,
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

class Measured {
 public:
  Measured(
      const std::vector<StepCosts>& replicas,
      const Schedule& schedule,
      const StepTasks& tasks,
      const Replay& replay) {
    for (const StepCosts& costs : replicas) {
      PipelineResult& pipeline = result_.pipelines.emplace_back();
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
        task.duration_ns;
  }

  // Grains that are left are spread over the devices when the step is over.
  void add_fill(const FillWork& fill, const Replay& replay) {
    if (fill.resources.empty()) {
      return;
    }
    const auto devices = static_cast<int64_t>(fill.resources.size());
    result_.step_ns += (replay.fill_left_ns + devices - 1) / devices;
    for (const FillSpan& span : replay.fills) {
      result_.step_ns = std::max(result_.step_ns, span.end_ns);
    }
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
      return planner::zb_h1(shape);
  }
  refuse(
      "step costs, schedule",
      "a known one",
      std::to_string(static_cast<int>(costs.schedule)));
}

StepResult simulate_step(const StepCosts& costs, const StepOptions& options) {
  return simulate_replicas({costs}, options);
}

StepResult simulate_step(const StepCosts& costs, bool keep_timeline) {
  StepOptions options;
  options.keep_timeline = keep_timeline;
  return simulate_step(costs, options);
}

StepResult simulate_replicas(
    const std::vector<StepCosts>& replicas,
    const StepOptions& options) {
  check_alike(replicas, options);
  return simulate_lists(replicas, schedule_of(replicas[0]), options);
}

StepResult simulate_lists(
    const std::vector<StepCosts>& replicas,
    const Schedule& schedule,
    const StepOptions& options) {
  check_alike(replicas, options);
  check_lists(replicas[0], schedule);
  const StepTasks tasks = tasks_of_step(replicas, schedule, options);
  const Replay times = replay(tasks.graph, tasks.fill);
  StepResult result = Measured(replicas, schedule, tasks, times).take();
  if (options.keep_timeline) {
    result.timeline = timeline_of(tasks, times);
  }
  return result;
}

}  // namespace pipetransformer::simulator
