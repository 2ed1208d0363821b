#include "simulator/prefix_tasks.h"

#include <cstddef>
#include <numeric>

namespace pipetransformer::simulator {

namespace {

using planner::PrefixPlacement;

class PrefixBuilder {
 public:
  PrefixBuilder(
      TaskGraph& graph,
      const planner::StepCosts& costs,
      const Devices& devices,
      std::vector<int32_t>& last)
      : graph_(graph), costs_(costs), devices_(devices), last_(last) {}

  // One micro-batch from front to back on one device.
  int32_t whole(int32_t microbatch, std::size_t device) {
    const int32_t done = compute(
        microbatch, device, prefix_per_microbatch_ns(costs_), /*after=*/-1);
    return device == 0 ? done : copy(microbatch, 0, done);
  }

  // One micro-batch through the devices, a part on each.
  int32_t passed_on(int32_t microbatch) {
    int32_t done = -1;
    for (std::size_t d = 0; d < costs_.prefix_ns.size(); ++d) {
      if (d > 0) {
        done = copy(microbatch, d, done);
      }
      done = compute(microbatch, d, costs_.prefix_ns[d], done);
    }
    return costs_.prefix_ns.size() == 1 ? done : copy(microbatch, 0, done);
  }

 private:
  int32_t compute(
      int32_t microbatch,
      std::size_t device,
      int64_t time_ns,
      int32_t after) {
    const int32_t task = graph_.add(
        {TaskKind::kPrefix,
         devices_.replica,
         static_cast<int32_t>(device),
         microbatch,
         Direction::kNone,
         devices_.compute[device],
         devices_.compute_ns(device, time_ns)});
    for (const int32_t earlier : {last_[device], after}) {
      if (earlier >= 0) {
        graph_.wait(task, earlier);
      }
    }
    return last_[device] = task;
  }

  int32_t copy(int32_t microbatch, std::size_t device, int32_t after) {
    if (costs_.prefix_copy_ns == 0) {
      return after;
    }
    const int32_t task = graph_.add(
        {TaskKind::kCopy,
         devices_.replica,
         static_cast<int32_t>(device),
         microbatch,
         Direction::kForward,
         devices_.forward_engine[device],
         costs_.prefix_copy_ns});
    graph_.wait(task, after);
    return task;
  }

  TaskGraph& graph_;
  const planner::StepCosts& costs_;
  const Devices& devices_;
  std::vector<int32_t>& last_;
};

}  // namespace

bool fills_gaps(const planner::StepCosts& costs, const StepOptions& options) {
  return options.prefix == PrefixMode::kFilled ||
         (options.prefix == PrefixMode::kBarrier &&
          costs.prefix_placement == PrefixPlacement::kFilled);
}

int64_t prefix_per_microbatch_ns(const planner::StepCosts& costs) {
  return std::accumulate(
      costs.prefix_ns.begin(), costs.prefix_ns.end(), int64_t{0});
}

std::vector<int32_t> add_prefix(
    TaskGraph& graph,
    const planner::StepCosts& costs,
    bool serial,
    const Devices& devices,
    std::vector<int32_t>& last) {
  std::vector<int32_t> arrived;
  if (costs.prefix_placement == PrefixPlacement::kNone) {
    return arrived;
  }
  PrefixBuilder builder(graph, costs, devices, last);
  const bool pipelined =
      costs.prefix_placement == PrefixPlacement::kPipelined && !serial;
  for (int64_t i = 0; i < costs.num_microbatches; ++i) {
    const auto microbatch = static_cast<int32_t>(i);
    const std::size_t device =
        serial ? 0 : static_cast<std::size_t>(i) % costs.stages.size();
    arrived.push_back(
        pipelined ? builder.passed_on(microbatch)
                  : builder.whole(microbatch, device));
  }
  return arrived;
}

}  // namespace pipetransformer::simulator
