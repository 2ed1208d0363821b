#include "planner/search/variants.h"

#include <algorithm>
#include <tuple>

#include "planner/costs/all_reduce.h"
#include "planner/costs/rates.h"
#include "planner/search/shapes.h"

namespace pipetransformer::planner {

namespace {

// Largest entry, and the share of K stages if all were equal.
int64_t slowest_at_least(const Column& costs, int64_t num_stages) {
  int64_t sum = 0;
  int64_t largest = 0;
  for (const int64_t cost : costs) {
    sum += cost;
    largest = std::max(largest, cost);
  }
  return std::max(largest, (sum + num_stages - 1) / num_stages);
}

// As lower_bound_ns, for the best cuts that could be: equal stages.
int64_t bound_of(
    const StepModel& model,
    const Cluster& cluster,
    const Variant& variant) {
  const LayerCosts& layers = model.layers();
  Column backward = layers.input_grad_ns;
  Column both = layers.forward_ns;
  int64_t once = 0;
  int64_t work = 0;  // of one micro-batch
  for (std::size_t i = 0; i < backward.size(); ++i) {
    backward[i] += layers.weight_grad_ns[i];
    both[i] += backward[i];
    work += both[i];
    once += variant.schedule == ScheduleKind::kZbH1
                ? layers.forward_ns[i] + layers.input_grad_ns[i]
                : both[i];
  }
  const int64_t num_stages = variant.shape.num_stages;
  const int64_t count = variant.shape.num_microbatches;
  int64_t pipe = 0;
  if (variant.schedule == ScheduleKind::kGPipe) {
    pipe =
        once + (count - 1) * (slowest_at_least(layers.forward_ns, num_stages) +
                              slowest_at_least(backward, num_stages));
  } else {
    pipe = std::max(once, count * slowest_at_least(both, num_stages));
  }
  const int64_t prefix = prefix_phase_ns(
      model.prefix().placement,
      model.prefix().per_microbatch_ns,
      num_stages,
      count);
  const int64_t on_cores = on_cores_ns(
      static_cast<__int128>(work) * count,
      cluster.cores_permille,
      replicas_per_node(cluster, variant.shape));
  int64_t filled = 0;  // on all devices, with what fills the gaps
  if (model.prefix().placement == PrefixPlacement::kFilled) {
    const __int128 each = work + model.prefix().per_microbatch_ns.front();
    filled = static_cast<int64_t>(count * each / num_stages);
  }
  return std::max(
      {model.prefix().cache_wait_ns + prefix + pipe,
       model.prefix().cache_read_ns,
       on_cores,
       filled});
}

// A single micro-batch has one order, besides what ZB-H1 lets a stage do while
// the next one has the gradient; a single stage runs ZB-H1 as 1F1B.
std::vector<ScheduleKind>
schedules(const Request& request, const Shape& shape) {
  std::vector<ScheduleKind> all = request.schedules;
  const auto has = [&all](ScheduleKind kind) {
    return std::find(all.begin(), all.end(), kind) != all.end();
  };
  if (shape.num_microbatches == 1) {
    const bool splits = shape.num_stages > 1 && has(ScheduleKind::kZbH1) &&
                        all.front() != ScheduleKind::kZbH1;
    all.resize(1);
    if (splits) {
      all.push_back(ScheduleKind::kZbH1);
    }
  } else if (shape.num_stages == 1 && has(ScheduleKind::kOneFOneB)) {
    all.erase(
        std::remove(all.begin(), all.end(), ScheduleKind::kZbH1), all.end());
  }
  return all;
}

std::vector<CacheTier> tiers(const Request& request, const Cluster& cluster) {
  if (request.workload.boundary == 0) {
    return {CacheTier::kNone};
  }
  std::vector<CacheTier> found;
  for (const CacheTier tier : request.cache_tiers) {
    if (has_tier(cluster, tier)) {
      found.push_back(tier);
    }
  }
  // Asked for tiers that are not there: the prefix is computed.
  return found.empty() ? std::vector<CacheTier>{CacheTier::kNone} : found;
}

// A single stage has no gaps, and what is cached does not run: there filled is
// as replicated, which is tried in its place; alone it stays what it is, so
// that a plan does not change its name when its prefix is cached.
std::vector<PrefixPlacement>
placements(const Request& request, const Shape& shape, CacheTier cache) {
  if (request.workload.boundary == 0) {
    return {PrefixPlacement::kNone};
  }
  std::vector<PrefixPlacement> all = request.prefix_placements;
  const bool nothing_to_fill =
      shape.num_stages == 1 || cache != CacheTier::kNone;
  if (nothing_to_fill && all.size() > 1) {
    all.erase(
        std::remove(all.begin(), all.end(), PrefixPlacement::kFilled),
        all.end());
  }
  return all;
}

// Those of one shape, for every schedule, tier and placement.
void add_variants(
    std::vector<Variant>& all,
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Shape& shape) {
  for (const ScheduleKind schedule : schedules(request, shape)) {
    for (const CacheTier cache : tiers(request, cluster)) {
      for (const PrefixPlacement placement :
           placements(request, shape, cache)) {
        Variant variant{shape, schedule, placement, cache, 0};
        const StepModel model(
            profile,
            cluster,
            request.workload,
            shape,
            schedule,
            placement,
            cache);
        variant.bound_ns = bound_of(model, cluster, variant);
        all.push_back(variant);
      }
    }
  }
}

}  // namespace

std::vector<Variant> variants(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request) {
  std::vector<Variant> all;
  for (const int64_t num_stages : stage_counts(request, profile, cluster)) {
    for (const int64_t replicas :
         replica_counts(request, cluster, num_stages)) {
      for (const int64_t count :
           microbatch_counts(request, num_stages, replicas)) {
        const Shape shape{num_stages, replicas, count};
        if (fills_microbatches(request, shape)) {
          add_variants(all, profile, cluster, request, shape);
        }
      }
    }
  }
  const auto key = [](const Variant& v) {
    return std::tuple(
        v.bound_ns,
        v.shape.num_stages,
        -v.shape.num_replicas,
        v.shape.num_microbatches,
        v.schedule,
        v.prefix,
        v.cache);
  };
  std::stable_sort(
      all.begin(), all.end(), [&key](const Variant& a, const Variant& b) {
        return key(a) < key(b);
      });
  return all;
}

}  // namespace pipetransformer::planner
