// What changes owner when one plan follows another: its class, the bytes that
// travel, and devices that would have to hold both plans at once.
//
// Pure functions of plain values, int64 bytes; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/input/layer_profile.h"
#include "planner/input/workload.h"
#include "planner/solvers/partition.h"

namespace pipetransformer::planner {

// Ordered by what they cost.
enum class TransitionKind {
  kNone,
  kBoundary,  // other frozen layers; same K, R, M, and cuts that follow from it
  kCuts,      // same K and R, other cuts, M or schedule
  kShape,     // other K or R: new groups, new replicas
};

// Where a plan puts what. Replica r of a node holds the node's devices r*K to
// r*K + K - 1; replicas are dealt to the nodes in turn.
struct Placement {
  Shape shape;
  Cuts cuts;                         // layer indices from the boundary to L
  std::vector<int64_t> state_bytes;  // per stage: all that lives between steps
                                     // and gradients; no activations
};

// A device that a new replica gets while the old pipeline still occupies it.
struct Crowded {
  int64_t node = 0;
  int64_t device = 0;  // of the node
  int64_t old_bytes = 0;
  int64_t new_bytes = 0;
};

struct Moves {
  // Weights and moments of active layers that change device in a process.
  int64_t device_bytes = 0;
  // Weights that train and their moments, of the whole model, once, if a new
  // replica needs them. The others it has: they are as they were loaded.
  int64_t replica_bytes = 0;
  bool across_nodes = false;  // some new replica is on another node than r = 0
  std::optional<Crowded> crowded;  // the device that misses most
};

// Class of the change; `same_order` says that schedule, placement of the prefix
// and cache tier stay. Cuts that are the old ones from the new boundary on
// count as the boundary's.
TransitionKind
transition_kind(const Placement& from, const Placement& to, bool same_order);

// Expects a checked profile and cluster and placements that fit them; throws
// std::invalid_argument when a placement has not K stages.
Moves moves(
    const Profile& profile,
    const Cluster& cluster,
    const Placement& from,
    const Placement& to);

// The old cuts at a new boundary: those behind it, with the new front. Nullopt
// when a stage would be empty.
std::optional<Cuts> clipped_cuts(const Cuts& cuts, int64_t boundary);

}  // namespace pipetransformer::planner
