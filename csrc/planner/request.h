// What a caller asks the planner for, and the errors it can be told at once.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/cost.h"
#include "planner/layer_profile.h"
#include "planner/partition.h"

namespace pipetransformer::planner {

// Unset options are the planner's choice.
struct Request {
  Workload workload;
  std::optional<int64_t> num_stages;
  std::optional<int64_t> max_replicas;
  std::optional<int64_t> num_microbatches;
  std::optional<Cuts> cuts;      // layer indices from the boundary to L
  std::optional<Shape> current;  // shape in use: kept unless clearly beaten
  int64_t min_microbatch_samples = 1;
};

// Throws std::invalid_argument naming the option, what is expected and what was
// given. Expects a checked profile and cluster.
void check(
    const Request& request,
    const Profile& profile,
    const Cluster& cluster);

// Cuts that separate no layers sharing a parameter; n + 1 entries counted from
// the boundary.
std::vector<char> allowed_cuts(const Profile& profile, int64_t boundary);

}  // namespace pipetransformer::planner
