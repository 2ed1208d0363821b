#include "planner/transition/moves.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace pipetransformer::planner {

namespace {

void require_stages(const Placement& placement, const char* what) {
  const auto stages = static_cast<std::size_t>(placement.shape.num_stages);
  if (placement.cuts.size() != stages + 1 ||
      placement.state_bytes.size() != stages) {
    throw std::invalid_argument(
        std::string(what) + ": expected cuts and bytes of " +
        std::to_string(stages) + " stages, got " +
        std::to_string(placement.cuts.size()) + " and " +
        std::to_string(placement.state_bytes.size()) + " entries");
  }
}

// Replicas on a node; they hold its devices from 0 on, K each.
int64_t
replicas_on(const Placement& placement, int64_t node, int64_t num_nodes) {
  return (placement.shape.num_replicas + num_nodes - 1 - node) / num_nodes;
}

// Whether a replica of `from` is driven from this device of the node: only
// then does its process have the model already.
bool drives(
    const Placement& from,
    int64_t node,
    int64_t device,
    int64_t num_nodes) {
  const int64_t num_stages = from.shape.num_stages;
  return device % num_stages == 0 &&
         device / num_stages < replicas_on(from, node, num_nodes);
}

int64_t stage_of(const Cuts& cuts, int64_t layer) {
  return std::upper_bound(cuts.begin(), cuts.end(), layer) - cuts.begin() - 1;
}

int64_t gradient_bytes(const Profile& profile, int64_t begin, int64_t end) {
  int64_t bytes = 0;
  for (int64_t i = begin; i < end; ++i) {
    bytes += profile.layers[static_cast<std::size_t>(i)].trainable_bytes;
  }
  return bytes;
}

// Bytes of each old stage between two steps: its gradients are gone.
std::vector<int64_t>
resting_bytes(const Profile& profile, const Placement& from) {
  std::vector<int64_t> bytes = from.state_bytes;
  for (std::size_t k = 0; k < bytes.size(); ++k) {
    const int64_t gradients =
        gradient_bytes(profile, from.cuts[k], from.cuts[k + 1]);
    bytes[k] = std::max<int64_t>(bytes[k] - gradients, 0);
  }
  return bytes;
}

int64_t moved_between_devices(
    const Profile& profile,
    const Cluster& cluster,
    const Placement& from,
    const Placement& to) {
  int64_t bytes = 0;
  for (int64_t i = to.cuts.front(); i < to.cuts.back(); ++i) {
    if (stage_of(from.cuts, i) != stage_of(to.cuts, i)) {
      const LayerProfile& layer = profile.layers[static_cast<std::size_t>(i)];
      bytes += layer.parameter_bytes + optimizer_bytes(layer, cluster);
    }
  }
  return bytes;
}

int64_t excess(const Crowded& crowded) {
  return crowded.old_bytes + crowded.new_bytes;
}

// The fullest device among those of one new replica.
Crowded fullest_device(
    const Placement& from,
    const Placement& to,
    const std::vector<int64_t>& resting,
    int64_t node,
    int64_t first,
    int64_t num_nodes) {
  const int64_t occupied =
      replicas_on(from, node, num_nodes) * from.shape.num_stages;
  Crowded worst;
  for (int64_t k = 0; k < to.shape.num_stages; ++k) {
    const int64_t device = first + k;
    const int64_t old_stage = device % from.shape.num_stages;
    const int64_t old_bytes =
        device < occupied ? resting[static_cast<std::size_t>(old_stage)] : 0;
    const Crowded here{
        node, device, old_bytes, to.state_bytes[static_cast<std::size_t>(k)]};
    if (old_bytes > 0 && excess(here) > excess(worst)) {
      worst = here;
    }
  }
  return worst;
}

}  // namespace

TransitionKind
transition_kind(const Placement& from, const Placement& to, bool same_order) {
  if (from.shape.num_stages != to.shape.num_stages ||
      from.shape.num_replicas != to.shape.num_replicas) {
    return TransitionKind::kShape;
  }
  if (!same_order || !(from.shape == to.shape)) {
    return TransitionKind::kCuts;
  }
  if (from.cuts == to.cuts) {
    return TransitionKind::kNone;
  }
  const std::optional<Cuts> clipped = clipped_cuts(from.cuts, to.cuts.front());
  return clipped == to.cuts ? TransitionKind::kBoundary : TransitionKind::kCuts;
}

Moves moves(
    const Profile& profile,
    const Cluster& cluster,
    const Placement& from,
    const Placement& to) {
  require_stages(from, "plan in force");
  require_stages(to, "new plan");
  Moves found;
  found.device_bytes = moved_between_devices(profile, cluster, from, to);
  const std::vector<int64_t> resting = resting_bytes(profile, from);
  Crowded worst;
  bool joins = false;
  for (int64_t node = 0; node < cluster.num_nodes; ++node) {
    const int64_t count = replicas_on(to, node, cluster.num_nodes);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t first = r * to.shape.num_stages;
      if (drives(from, node, first, cluster.num_nodes)) {
        continue;
      }
      joins = true;
      found.across_nodes |= node > 0;
      const Crowded here =
          fullest_device(from, to, resting, node, first, cluster.num_nodes);
      if (excess(here) > excess(worst)) {
        worst = here;
      }
    }
  }
  if (joins) {
    for (const LayerProfile& layer : profile.layers) {
      found.replica_bytes +=
          layer.trainable_bytes + optimizer_bytes(layer, cluster);
    }
  }
  if (excess(worst) > cluster.device_memory_bytes) {
    found.crowded = worst;
  }
  return found;
}

std::optional<Cuts> clipped_cuts(const Cuts& cuts, int64_t boundary) {
  if (cuts.size() < 2 || boundary >= cuts.back()) {
    return std::nullopt;
  }
  Cuts clipped{boundary};
  for (std::size_t k = 1; k < cuts.size(); ++k) {
    if (cuts[k] <= boundary) {
      return std::nullopt;
    }
    clipped.push_back(cuts[k]);
  }
  return clipped;
}

}  // namespace pipetransformer::planner
