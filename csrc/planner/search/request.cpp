#include "planner/search/request.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "planner/search/shapes.h"

namespace pipetransformer::planner {

namespace {

using std::to_string;

[[noreturn]] void refuse_request(const std::string& text) {
  throw std::invalid_argument(text);
}

void require_positive(int64_t value, const char* what) {
  if (value < 1) {
    refuse_request(
        std::string(what) + ": expected at least 1, got " + to_string(value));
  }
}

void require_at_most(
    int64_t value,
    int64_t limit,
    const char* what,
    const char* why) {
  if (value > limit) {
    refuse_request(
        std::string(what) + ": expected at most " + to_string(limit) + " (" +
        why + "), got " + to_string(value));
  }
}

void require_not_shared(
    const Profile& profile,
    int64_t cut,
    const std::string& what) {
  for (const auto& [first, second] : profile.tied_layers) {
    if (first < cut && cut <= second) {
      refuse_request(
          what +
          ": expected no parameter shared across it, got one shared by "
          "layers " +
          to_string(first) + " and " + to_string(second));
    }
  }
}

void require_no_skip_past(const Profile& profile, int64_t boundary) {
  for (const auto& [first, second] : profile.skips) {
    if (first < boundary && boundary <= second) {
      refuse_request(
          "boundary " + to_string(boundary) +
          ": expected no skip past it, got one from layer " + to_string(first) +
          " to layer " + to_string(second));
    }
  }
}

void check_cuts(
    const Cuts& cuts,
    const Profile& profile,
    const Request& request) {
  const int64_t boundary = request.workload.boundary;
  const int64_t num_layers = profile.num_layers();
  const std::string ends =
      to_string(boundary) + " and " + to_string(num_layers);
  if (cuts.size() < 2) {
    refuse_request(
        "forced cuts: expected at least the ends " + ends + ", got " +
        to_string(cuts.size()) + " indices");
  }
  if (cuts.front() != boundary || cuts.back() != num_layers) {
    refuse_request(
        "forced cuts: expected the ends " + ends + ", got " +
        to_string(cuts.front()) + " and " + to_string(cuts.back()));
  }
  for (std::size_t k = 1; k < cuts.size(); ++k) {
    if (cuts[k] <= cuts[k - 1]) {
      refuse_request(
          "forced cuts: expected increasing layer indices, got " +
          to_string(cuts[k]) + " after " + to_string(cuts[k - 1]));
    }
  }
  for (std::size_t k = 1; k + 1 < cuts.size(); ++k) {
    require_not_shared(
        profile, cuts[k], "forced cut at layer " + to_string(cuts[k]));
  }
  const auto num_stages = static_cast<int64_t>(cuts.size()) - 1;
  if (request.num_stages && *request.num_stages != num_stages) {
    refuse_request(
        "forced cuts: expected " + to_string(*request.num_stages + 1) +
        " indices (num_stages + 1), got " + to_string(cuts.size()));
  }
}

void check_num_stages(
    int64_t num_stages,
    const Profile& profile,
    const Cluster& cluster,
    int64_t boundary) {
  require_positive(num_stages, "num_stages");
  require_at_most(
      num_stages,
      profile.num_layers() - boundary,
      "num_stages",
      "active layers");
  require_at_most(
      num_stages, cluster.devices_per_node, "num_stages", "devices per node");
}

// With K and M forced, the least R follows: the user can be told before any
// search.
void check_batch(
    const Request& request,
    const Cluster& cluster,
    int64_t num_stages) {
  const int64_t replicas = replica_counts(request, cluster, num_stages).back();
  const int64_t microbatches = *request.num_microbatches;
  require_at_most(
      microbatches,
      kMostCells / num_stages,
      "num_microbatches",
      "cells of a plan / num_stages");
  if (microbatches > request.workload.global_batch / replicas) {
    refuse_request(
        "replicas x micro-batches: expected at most " +
        to_string(request.workload.global_batch) + " (the global batch), got " +
        to_string(replicas) + " x " + to_string(microbatches));
  }
}

}  // namespace

void check(
    const Request& request,
    const Profile& profile,
    const Cluster& cluster) {
  const int64_t boundary = request.workload.boundary;
  if (boundary < 0 || boundary >= profile.num_layers()) {
    refuse_request(
        "boundary: expected 0 to " + to_string(profile.num_layers() - 1) +
        " (the last layer stays active), got " + to_string(boundary));
  }
  if (boundary > 0) {
    require_not_shared(profile, boundary, "boundary " + to_string(boundary));
    require_no_skip_past(profile, boundary);
  }
  require_positive(request.min_microbatch_samples, "min_microbatch_samples");
  require_positive(request.max_replicas.value_or(1), "max_replicas");
  require_positive(request.min_replicas, "min_replicas");
  require_positive(request.num_microbatches.value_or(1), "num_microbatches");
  require_positive(request.workload.num_samples.value_or(1), "num_samples");
  require_positive(request.workload.accumulation_steps, "accumulation_steps");
  if (request.schedules.empty() || request.prefix_placements.empty() ||
      request.cache_tiers.empty()) {
    refuse_request(
        "schedules, prefix placements, cache tiers: expected at least one of "
        "each, got none");
  }
  std::optional<int64_t> num_stages = request.num_stages;
  if (request.cuts) {
    check_cuts(*request.cuts, profile, request);
    num_stages = static_cast<int64_t>(request.cuts->size()) - 1;
  }
  if (num_stages) {
    check_num_stages(*num_stages, profile, cluster, boundary);
    if (request.num_microbatches) {
      check_batch(request, cluster, *num_stages);
    }
  }
}

}  // namespace pipetransformer::planner
