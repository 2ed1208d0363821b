#include <stdexcept>
#include <string>

#include "simulator/step_tasks.h"

namespace pipetransformer::simulator {

namespace {

using planner::PrefixPlacement;
using planner::StageCosts;
using planner::StepCosts;

// No sum over 2^24 operations overflows.
constexpr int64_t kLargestValue = int64_t{1} << 53;
constexpr int64_t kMostOperations = int64_t{1} << 24;

[[noreturn]] void
refuse(const std::string& what, const std::string& expected, int64_t got) {
  throw std::invalid_argument(
      "step costs, " + what + ": expected " + expected + ", got " +
      std::to_string(got));
}

void check_value(int64_t value, const std::string& what) {
  if (value < 0 || value > kLargestValue) {
    refuse(what, "0 to 2^53", value);
  }
}

void check_stage(const StageCosts& stage, const std::string& what) {
  check_value(stage.forward_ns, what + " forward_ns");
  check_value(stage.recompute_ns, what + " recompute_ns");
  check_value(stage.input_grad_ns, what + " input_grad_ns");
  check_value(stage.weight_grad_ns, what + " weight_grad_ns");
  check_value(stage.forward_copy_ns, what + " forward_copy_ns");
  check_value(stage.backward_copy_ns, what + " backward_copy_ns");
  check_value(stage.all_reduce_ns, what + " all_reduce_ns");
  check_value(stage.state_bytes, what + " state_bytes");
  check_value(stage.kept_bytes, what + " kept_bytes");
  check_value(stage.recomputed_bytes, what + " recomputed_bytes");
  check_value(stage.kept_for_weights_bytes, what + " kept_for_weights_bytes");
}

void check_stages(const StepCosts& costs) {
  const auto num_stages = static_cast<int64_t>(costs.stages.size());
  if (num_stages < 1) {
    refuse("stages", "at least 1", num_stages);
  }
  const int64_t most = kMostOperations / 4 / num_stages;
  if (costs.num_microbatches < 1 || costs.num_microbatches > most) {
    refuse(
        "num_microbatches",
        "1 to " + std::to_string(most),
        costs.num_microbatches);
  }
  if (costs.num_recomputed < 0 ||
      costs.num_recomputed > costs.num_microbatches) {
    refuse(
        "num_recomputed",
        "0 to " + std::to_string(costs.num_microbatches),
        costs.num_recomputed);
  }
  for (std::size_t j = 0; j < costs.stages.size(); ++j) {
    const std::string what = "stage " + std::to_string(j);
    check_stage(costs.stages[j], what);
    if (j > 0 && costs.stages[j - 1].has_backward &&
        !costs.stages[j].has_backward) {
      refuse(what + " has_backward", "true as of the stage before it", 0);
    }
  }
}

void check_prefix(const StepCosts& costs) {
  std::size_t expected = 0;
  if (costs.prefix_placement == PrefixPlacement::kReplicated) {
    expected = 1;
  } else if (costs.prefix_placement == PrefixPlacement::kPipelined) {
    expected = costs.stages.size();
  }
  if (costs.prefix_ns.size() != expected) {
    refuse(
        "prefix_ns",
        std::to_string(expected) + " entries",
        static_cast<int64_t>(costs.prefix_ns.size()));
  }
  for (const int64_t time_ns : costs.prefix_ns) {
    check_value(time_ns, "prefix_ns");
  }
  check_value(costs.prefix_copy_ns, "prefix_copy_ns");
  check_value(costs.cache_read_ns, "cache_read_ns");
}

}  // namespace

void check(const StepCosts& costs, const StepOptions& options) {
  check_stages(costs);
  check_prefix(costs);
  check_value(options.cache_write_ns, "cache_write_ns");
  if (!options.optimizer_ns.empty() &&
      options.optimizer_ns.size() != costs.stages.size()) {
    refuse(
        "optimizer_ns",
        std::to_string(costs.stages.size()) + " entries or none",
        static_cast<int64_t>(options.optimizer_ns.size()));
  }
  for (const int64_t time_ns : options.optimizer_ns) {
    check_value(time_ns, "optimizer_ns");
  }
}

}  // namespace pipetransformer::simulator
