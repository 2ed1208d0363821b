#include "planner/search/refusals.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "planner/search/candidates.h"
#include "planner/search/shapes.h"

namespace pipetransformer::planner {

namespace {

Cuts shifted_back(const Cuts& cuts) {
  Cuts shifted = cuts;
  for (int64_t& cut : shifted) {
    cut -= cuts.front();
  }
  return shifted;
}

int64_t fullest(const StageMemory& memory, const Cuts& cuts) {
  int64_t most = 0;
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    const auto stage = static_cast<int64_t>(k);
    most = std::max(most, memory.stage(stage, cuts[k], cuts[k + 1]));
  }
  return most;
}

// Cuts whose fullest stage is as small as it can be; forced ones as given.
std::optional<Cuts> leanest_cuts(
    const StageMemory& memory,
    const Request& request,
    const Rules& rules,
    int64_t num_stages) {
  if (request.cuts) {
    return shifted_back(*request.cuts);
  }
  const Rules no_limits{rules.cut_allowed, {}, {}};
  std::optional<Cuts> best;
  int64_t least = 0;  // no cuts take less
  for (const MemoryPoint& point : memory.points) {
    const StageCost bytes{point.base, memory.per_microbatch, point.counts};
    auto found = min_max(bytes, no_limits, num_stages);
    if (!found) {
      return std::nullopt;
    }
    least = std::max(least, found->value);
    if (!best || fullest(memory, found->cuts) < fullest(memory, *best)) {
      best = std::move(found->cuts);
    }
  }
  Rules capped = rules;
  int64_t most = fullest(memory, *best) - memory.fixed;
  while (least < most) {
    const int64_t cap = least + (most - least) / 2;
    for (StageLimit& limit : capped.stage_limits) {
      limit.cap = cap;
    }
    if (auto cuts = cuts_within(capped, num_stages)) {
      best = std::move(cuts);
      most = fullest(memory, *best) - memory.fixed;
    } else {
      least = cap + 1;
    }
  }
  return best;
}

void name_worst_stage(
    Refusal& refusal,
    const StageMemory& memory,
    const Cuts& cuts,
    int64_t boundary,
    int64_t device_bytes) {
  int64_t most = -1;
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    const int64_t bytes =
        memory.stage(static_cast<int64_t>(k), cuts[k], cuts[k + 1]);
    if (bytes > most) {
      most = bytes;
      refusal.stage_begin = cuts[k];
      refusal.stage_end = cuts[k + 1];
    }
  }
  const auto size = [&memory](int64_t i) {
    int64_t bytes = 0;
    for (const MemoryPoint& point : memory.points) {
      bytes = std::max(
          bytes,
          point.base.layers(i, i + 1) +
              point.counts.front() * memory.per_microbatch.layers(i, i + 1));
    }
    return bytes;
  };
  refusal.layer = refusal.stage_begin;
  for (int64_t i = refusal.stage_begin; i < refusal.stage_end; ++i) {
    if (size(i) > size(refusal.layer)) {
      refusal.layer = i;
    }
  }
  refusal.missing_bytes = most - device_bytes;
  refusal.stage_begin += boundary;
  refusal.stage_end += boundary;
  refusal.layer += boundary;
}

Refusal refuse(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Variant& variant) {
  const StepModel model = model_of(profile, cluster, request, variant);
  const int64_t boundary = request.workload.boundary;
  Refusal refusal;
  refusal.shape = variant.shape;
  const int64_t room = cluster.device_memory_bytes - model.memory().fixed;
  if (room < 0) {
    refusal.cause = RefusalCause::kFixedMemory;
    refusal.missing_bytes = -room;
    return refusal;
  }
  const Rules rules = rules_of(model, profile, cluster, boundary);
  const auto cuts =
      leanest_cuts(model.memory(), request, rules, variant.shape.num_stages);
  if (!cuts) {
    refusal.cause = RefusalCause::kSharedParameters;
    return refusal;
  }
  name_worst_stage(
      refusal, model.memory(), *cuts, boundary, cluster.device_memory_bytes);
  return refusal;
}

}  // namespace

std::optional<Refusal> refusal_of(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    int64_t num_stages) {
  Request of_length = request;
  of_length.num_stages = num_stages;
  std::optional<Refusal> closest;
  for (const Variant& variant : variants(profile, cluster, of_length)) {
    if (fits_somehow(profile, cluster, request, variant)) {
      return std::nullopt;
    }
    const Refusal refusal = refuse(profile, cluster, request, variant);
    if (!closest || refusal.missing_bytes < closest->missing_bytes) {
      closest = refusal;
    }
  }
  if (closest) {
    return closest;
  }
  const int64_t replicas = replica_counts(request, cluster, num_stages).back();
  const std::vector<int64_t> counts =
      microbatch_counts(request, num_stages, replicas);
  Refusal batch;
  batch.cause = RefusalCause::kBatch;
  // Of finer micro-batches there may be none to try.
  batch.shape = {num_stages, replicas, counts.empty() ? 0 : counts.front()};
  return batch;
}

}  // namespace pipetransformer::planner
