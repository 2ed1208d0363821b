// What a caller asks the planner for, and the errors it can be told at once.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/costs/step_costs.h"
#include "planner/input/layer_profile.h"
#include "planner/input/workload.h"
#include "planner/solvers/partition.h"

namespace pipetransformer::planner {

// Most cells (stages x micro-batches) of a plan.
inline constexpr int64_t kMostCells = int64_t{1} << 19;

// Unset options are the planner's choice.
struct Request {
  Workload workload;
  std::optional<int64_t> num_stages;
  std::optional<int64_t> max_replicas;
  int64_t min_replicas = 1;   // where as many fit
  bool all_replicas = false;  // as many as fit and may be, however slow
  std::optional<int64_t> num_microbatches;
  std::optional<Cuts> cuts;  // layer indices from the boundary to L
  int64_t min_microbatch_samples = 1;
  // Of M to choose, those beyond 6K alone, for a search that found no plan up
  // to there: smaller micro-batches take less memory.
  bool finer_microbatches = false;
  // What may be chosen, none of them empty. Placements and tiers matter to
  // frozen layers alone.
  std::vector<ScheduleKind> schedules{ScheduleKind::kGPipe};
  std::vector<PrefixPlacement> prefix_placements{
      PrefixPlacement::kReplicated,
      PrefixPlacement::kPipelined};
  std::vector<CacheTier> cache_tiers{CacheTier::kNone};
};

// Throws std::invalid_argument naming the option, what is expected and what was
// given. Expects a checked profile and cluster.
void check(
    const Request& request,
    const Profile& profile,
    const Cluster& cluster);

}  // namespace pipetransformer::planner
