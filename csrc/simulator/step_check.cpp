#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "simulator/prefix_tasks.h"
#include "simulator/step_tasks.h"

namespace pipetransformer::simulator {

namespace {

using planner::PrefixPlacement;
using planner::StageCosts;
using planner::StepCosts;

using Wide = __int128;

constexpr int64_t kLongestNs = int64_t{1} << 53;  // 104 days
constexpr int64_t kLongestPrefixNs = int64_t{1} << 60;
constexpr int64_t kMostBytes = int64_t{1} << 61;
constexpr int64_t kMostMicrobatches = int64_t{1} << 22;  // over all stages
constexpr int64_t kMostDevices = int64_t{1} << 30;
constexpr int64_t kSlowest = 100'000;

[[noreturn]] void
refuse(const std::string& what, const std::string& expected, int64_t got) {
  throw std::invalid_argument(
      "step costs, " + what + ": expected " + expected + ", got " +
      std::to_string(got));
}

void check_range(int64_t value, int64_t most, const std::string& what) {
  if (value < 0 || value > most) {
    refuse(what, "0 to " + std::to_string(most), value);
  }
}

void check_ns(int64_t value, const std::string& what) {
  check_range(value, kLongestNs, what);
}

// What all micro-batches keep together must fit, too.
void check_bytes(
    const StageCosts& stage,
    int64_t num_microbatches,
    const std::string& what) {
  const int64_t most = kMostBytes / 4 / num_microbatches;
  check_range(stage.state_bytes, kMostBytes, what + " state_bytes");
  check_range(stage.shared_bytes, kMostBytes / 4, what + " shared_bytes");
  check_range(stage.kept_bytes, most, what + " kept_bytes");
  check_range(stage.recomputed_bytes, most, what + " recomputed_bytes");
  check_range(
      stage.kept_for_weights_bytes, most, what + " kept_for_weights_bytes");
  check_range(
      stage.summed_gradient_bytes,
      kMostBytes / 4,
      what + " summed_gradient_bytes");
  check_range(
      stage.passing_gradient_bytes,
      kMostBytes / 4,
      what + " passing_gradient_bytes");
}

void check_times(const StageCosts& stage, const std::string& what) {
  check_ns(stage.forward_ns, what + " forward_ns");
  check_ns(stage.recompute_ns, what + " recompute_ns");
  check_ns(stage.input_grad_ns, what + " input_grad_ns");
  check_ns(stage.weight_grad_ns, what + " weight_grad_ns");
  check_ns(stage.forward_copy_ns, what + " forward_copy_ns");
  check_ns(stage.backward_copy_ns, what + " backward_copy_ns");
  check_ns(stage.all_reduce_ns, what + " all_reduce_ns");
  check_range(
      stage.network_all_reduce_ns,
      stage.all_reduce_ns,
      what + " network_all_reduce_ns");
}

void check_stages(const StepCosts& costs) {
  const auto num_stages = static_cast<int64_t>(costs.stages.size());
  if (num_stages < 1) {
    refuse("stages", "at least 1", num_stages);
  }
  const int64_t most = kMostMicrobatches / num_stages;
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
    check_times(costs.stages[j], what);
    check_bytes(costs.stages[j], costs.num_microbatches, what);
    if (j > 0 && costs.stages[j - 1].has_backward &&
        !costs.stages[j].has_backward) {
      refuse(what + " has_backward", "true as of the stage before it", 0);
    }
  }
}

// A pipelined prefix of few layers leaves devices without a part.
void check_prefix(const StepCosts& costs) {
  const auto count = static_cast<int64_t>(costs.prefix_ns.size());
  int64_t least = 1;
  int64_t most = 1;
  if (costs.prefix_placement == PrefixPlacement::kNone) {
    least = most = 0;
  } else if (costs.prefix_placement == PrefixPlacement::kPipelined) {
    most = static_cast<int64_t>(costs.stages.size());
  }
  if (count < least || count > most) {
    refuse(
        "prefix_ns",
        std::to_string(least) + " to " + std::to_string(most) + " entries",
        count);
  }
  Wide total = 0;
  for (const int64_t time_ns : costs.prefix_ns) {
    check_ns(time_ns, "prefix_ns");
    total += time_ns;
  }
  if (total * costs.num_microbatches > kLongestPrefixNs) {
    refuse(
        "prefix_ns",
        "at most 2^60 ns over all micro-batches",
        static_cast<int64_t>(std::min<Wide>(total, INT64_MAX)));
  }
  check_ns(costs.prefix_grain_ns, "prefix_grain_ns");
  check_ns(costs.prefix_copy_ns, "prefix_copy_ns");
  check_ns(costs.cache_read_ns, "cache_read_ns");
  check_ns(costs.cache_wait_ns, "cache_wait_ns");
  check_ns(costs.process_ns, "process_ns");
  if (costs.accumulation_steps < 1) {
    refuse("accumulation_steps", "at least 1", costs.accumulation_steps);
  }
}

void check_sharing(const StepCosts& costs) {
  const int64_t cores = costs.cores_permille;
  if (cores != 0 && (cores < 1000 || cores > kMostDevices)) {
    refuse(
        "cores_permille",
        "0 or 1000 to " + std::to_string(kMostDevices),
        cores);
  }
  const int64_t replicas = costs.replicas_per_node;
  if (replicas < 1 || replicas > kMostDevices) {
    refuse(
        "replicas_per_node", "1 to " + std::to_string(kMostDevices), replicas);
  }
}

void check_replicas(
    const StepCosts& costs,
    const std::vector<Permille>& replicas,
    const StepOptions& options) {
  const auto count = static_cast<int64_t>(replicas.size());
  if (count < 1) {
    refuse("replicas", "at least 1", count);
  }
  if (count > 1 && fills_gaps(costs, options)) {
    refuse("replicas with a prefix in the pipeline's gaps", "1", count);
  }
  for (const Permille& permille : replicas) {
    if (!permille.empty() && permille.size() != costs.stages.size()) {
      refuse(
          "speeds of a replica's devices",
          std::to_string(costs.stages.size()) + " or none",
          static_cast<int64_t>(permille.size()));
    }
    for (const int64_t value : permille) {
      if (value < 1 || value > kSlowest) {
        refuse(
            "speed of a device",
            "1 to " + std::to_string(kSlowest) + " thousandths",
            value);
      }
    }
  }
}

}  // namespace

void check(
    const StepCosts& costs,
    const std::vector<Permille>& replicas,
    const StepOptions& options) {
  check_stages(costs);
  check_prefix(costs);
  check_sharing(costs);
  check_replicas(costs, replicas, options);
}

}  // namespace pipetransformer::simulator
