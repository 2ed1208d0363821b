#include "simulator/memory.h"

#include <algorithm>

namespace pipetransformer::simulator {

namespace {

using planner::Op;
using planner::OpKind;
using planner::StageCosts;

int64_t peak_of_stage(
    const StageCosts& stage,
    const planner::StageOps& ops,
    int64_t num_recomputed) {
  int64_t live = stage.state_bytes + stage.shared_bytes;
  int64_t peak = live;
  bool has_gradients = false;
  const int64_t whole = stage.kept_bytes + stage.recomputed_bytes;
  for (const Op& op : ops) {
    const bool recomputed = op.microbatch < num_recomputed;
    int64_t taken = 0;       // while it runs
    int64_t given_back = 0;  // when it ends
    switch (op.kind) {
      case OpKind::kForward:
        taken = recomputed && stage.has_backward ? stage.kept_bytes : whole;
        given_back = stage.has_backward ? 0 : taken;
        break;
      case OpKind::kRecompute:
        taken = stage.recomputed_bytes;
        break;
      case OpKind::kBackward:
        given_back = whole;
        break;
      case OpKind::kInputGrad:
        given_back = whole - stage.kept_for_weights_bytes;
        break;
      case OpKind::kWeightGrad:
        given_back = stage.kept_for_weights_bytes;
        break;
    }
    peak = std::max(peak, live + taken);
    live += taken - given_back;
    if (op.kind == OpKind::kBackward || op.kind == OpKind::kWeightGrad) {
      peak = std::max(
          peak, live + (has_gradients ? stage.passing_gradient_bytes : 0));
      live += has_gradients ? 0 : stage.summed_gradient_bytes;
      has_gradients = true;
    }
    peak = std::max(peak, live);
  }
  return peak;
}

}  // namespace

std::vector<int64_t>
peak_bytes(const planner::StepCosts& costs, const planner::Schedule& schedule) {
  std::vector<int64_t> peaks;
  for (std::size_t j = 0; j < schedule.size(); ++j) {
    peaks.push_back(
        peak_of_stage(costs.stages[j], schedule[j], costs.num_recomputed));
  }
  return peaks;
}

}  // namespace pipetransformer::simulator
