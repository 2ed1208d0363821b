#include "planner/search.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>

#include "planner/memory.h"
#include "planner/shapes.h"
#include "planner/staircase.h"

namespace pipetransformer::planner {

namespace {

using Wide = __int128;
using Outcome = std::variant<Candidate, Refusal>;

constexpr std::size_t kMostCandidates = 8;
// A new shape must take at most 98 % of the time of the current one.
constexpr int64_t kAcceptPercent = 98;

bool better(const Candidate& a, const Candidate& b) {
  return std::tie(a.step_ns, a.cuts, a.shape.num_microbatches) <
         std::tie(b.step_ns, b.cuts, b.shape.num_microbatches);
}

Cuts shifted(Cuts cuts, int64_t by) {
  for (int64_t& cut : cuts) {
    cut += by;
  }
  return cuts;
}

// Cuts that need the least memory, to name what misses; forced ones as given.
std::optional<Cuts> leanest_cuts(
    const SpanCost& bytes,
    const Request& request,
    const Rules& rules,
    int64_t num_stages) {
  if (request.cuts) {
    return shifted(*request.cuts, -request.workload.boundary);
  }
  const Rules no_limits{rules.cut_allowed, {}};
  std::optional<MinMax> found = min_max(bytes, no_limits, num_stages);
  return found ? std::optional<Cuts>(std::move(found->cuts)) : std::nullopt;
}

Refusal memory_refusal(
    const SpanCost& bytes,
    const Request& request,
    const Rules& rules,
    const Shape& shape,
    int64_t room_bytes) {
  Refusal refusal;
  refusal.shape = shape;
  const auto cuts = leanest_cuts(bytes, request, rules, shape.num_stages);
  if (!cuts) {
    refusal.cause = RefusalCause::kSharedParameters;
    return refusal;
  }
  std::size_t worst = 0;
  for (std::size_t k = 0; k + 1 < cuts->size(); ++k) {
    if (bytes.stage((*cuts)[k], (*cuts)[k + 1]) >
        bytes.stage((*cuts)[worst], (*cuts)[worst + 1])) {
      worst = k;
    }
  }
  const int64_t begin = (*cuts)[worst];
  const int64_t end = (*cuts)[worst + 1];
  int64_t layer = begin;
  for (int64_t i = begin; i < end; ++i) {
    if (bytes.layers(i, i + 1) > bytes.layers(layer, layer + 1)) {
      layer = i;
    }
  }
  const int64_t boundary = request.workload.boundary;
  refusal.missing_bytes = bytes.stage(begin, end) - room_bytes;
  refusal.stage_begin = boundary + begin;
  refusal.stage_end = boundary + end;
  refusal.layer = boundary + layer;
  return refusal;
}

// Every partition that may be the best one of this shape.
std::vector<Cuts> cuts_to_score(
    const StepCost& cost,
    const Request& request,
    const Rules& rules,
    int64_t num_stages) {
  if (request.cuts) {
    Cuts cuts = shifted(*request.cuts, -request.workload.boundary);
    const Limit& memory = rules.limits.front();
    const bool fits = largest_stage(memory.cost, cuts) <= memory.cap;
    return fits ? std::vector<Cuts>{std::move(cuts)} : std::vector<Cuts>{};
  }
  std::vector<Cuts> all;
  for (StaircasePoint& point :
       staircase(cost.forward(), cost.backward(), rules, num_stages)) {
    all.push_back(std::move(point.cuts));
  }
  return all;
}

Candidate make_candidate(
    const Shape& shape,
    const StepCost& cost,
    const SpanCost& bytes,
    int64_t fixed,
    const Cuts& cuts) {
  Candidate candidate{shape, cuts, cost.step_ns(cuts), {}};
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    candidate.bytes_per_stage.push_back(
        fixed + bytes.stage(cuts[k], cuts[k + 1]));
  }
  return candidate;
}

Outcome plan_shape(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Shape& shape) {
  const Workload& workload = request.workload;
  Refusal refusal;
  refusal.shape = shape;
  if (!fills_microbatches(request, shape)) {
    refusal.cause = RefusalCause::kBatch;
    return refusal;
  }
  const int64_t fixed = fixed_bytes(profile, cluster, workload.boundary);
  const int64_t room = cluster.device_memory_bytes - fixed;
  if (room < 0) {
    refusal.cause = RefusalCause::kFixedMemory;
    refusal.missing_bytes = -room;
    return refusal;
  }
  const SpanCost bytes = stage_bytes(profile, cluster, workload, shape);
  const Rules rules{allowed_cuts(profile, workload.boundary), {{bytes, room}}};
  const StepCost cost(profile, cluster, workload, shape);
  std::optional<Candidate> best;
  for (const Cuts& cuts :
       cuts_to_score(cost, request, rules, shape.num_stages)) {
    Candidate candidate = make_candidate(shape, cost, bytes, fixed, cuts);
    if (!best || better(candidate, *best)) {
      best = std::move(candidate);
    }
  }
  if (!best) {
    return memory_refusal(bytes, request, rules, shape, room);
  }
  best->cuts = shifted(std::move(best->cuts), workload.boundary);
  return *std::move(best);
}

void choose(
    SearchResult& result,
    std::vector<Candidate> all,
    const Request& request) {
  std::sort(all.begin(), all.end(), better);
  if (all.empty()) {
    return;
  }
  result.chosen = all.front();
  const auto current =
      std::find_if(all.begin(), all.end(), [&](const Candidate& candidate) {
        return request.current && candidate.shape == *request.current;
      });
  if (current != all.end() && current != all.begin() &&
      Wide{all.front().step_ns} * 100 >
          Wide{current->step_ns} * kAcceptPercent) {
    result.chosen = *current;
    result.kept_current = true;
  }
  all.resize(std::min(all.size(), kMostCandidates));
  result.candidates = std::move(all);
}

std::vector<int64_t> counts_with_current(
    const Request& request,
    int64_t num_stages,
    int64_t num_replicas) {
  std::vector<int64_t> counts =
      microbatch_counts(request, num_stages, num_replicas);
  const Shape& current = request.current.value_or(Shape{});
  if (request.current && !request.num_microbatches &&
      current.num_stages == num_stages &&
      std::find(counts.begin(), counts.end(), current.num_microbatches) ==
          counts.end()) {
    counts.push_back(current.num_microbatches);
  }
  return counts;
}

}  // namespace

SearchResult
search(const Profile& profile, const Cluster& cluster, const Request& request) {
  check(profile, cluster, request.workload.global_batch);
  check(request, profile, cluster);
  SearchResult result;
  std::vector<Candidate> all;
  for (const int64_t num_stages : stage_counts(request, profile, cluster)) {
    const int64_t replicas = num_replicas(request, cluster, num_stages);
    std::optional<Refusal> closest;
    bool feasible = false;
    for (const int64_t num_microbatches :
         counts_with_current(request, num_stages, replicas)) {
      Outcome outcome = plan_shape(
          profile, cluster, request, {num_stages, replicas, num_microbatches});
      if (auto* candidate = std::get_if<Candidate>(&outcome)) {
        all.push_back(std::move(*candidate));
        feasible = true;
        continue;
      }
      const Refusal& refusal = std::get<Refusal>(outcome);
      // Memory says more than the batch, which only ends the list of M.
      if (!closest || (refusal.cause != RefusalCause::kBatch &&
                       refusal.missing_bytes < closest->missing_bytes)) {
        closest = refusal;
      }
    }
    if (!feasible && closest) {
      result.refusals.push_back(*closest);
    }
  }
  choose(result, std::move(all), request);
  return result;
}

}  // namespace pipetransformer::planner
