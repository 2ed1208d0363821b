#include "planner/costs/prefix.h"

#include <algorithm>
#include <cstddef>

#include "planner/costs/rates.h"

namespace pipetransformer::planner {

namespace {

using Wide = __int128;

constexpr int64_t kNeverFits = int64_t{1} << 60;  // bytes

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

struct Tier {
  std::optional<int64_t> bytes;  // per node; nullopt: without limit
  std::optional<int64_t> bytes_per_s;
  int64_t record_ns = 0;
  bool in_line = false;
};

Tier tier_of(const Cluster& cluster, CacheTier tier) {
  if (!cluster.cache || tier == CacheTier::kDevice) {
    return {};
  }
  const CacheTiers& tiers = *cluster.cache;
  const bool host = tier == CacheTier::kHost;
  const int64_t rate = host ? tiers.host_bytes_per_s : tiers.disk_bytes_per_s;
  return {
      host ? tiers.host_bytes : tiers.disk_bytes,
      rate > 0 ? std::optional(rate) : std::nullopt,
      host ? tiers.host_record_ns : 0,
      host && tiers.host_in_line};
}

// Rows in the mean: `whole`, and one more in `more` of `of` cases.
struct MeanRows {
  int64_t whole = 0;
  int64_t more = 0;
  int64_t of = 1;

  bool any() const {
    return whole > 0 || more > 0;
  }
};

// Of `rows` those whose samples are among `part` of `whole`, which is at least
// that and 1. Exact.
MeanRows share_of(int64_t rows, int64_t part, int64_t whole) {
  const Wide product = Wide{rows} * part;
  return {
      static_cast<int64_t>(product / whole),
      static_cast<int64_t>(product % whole),
      whole};
}

// Mean of what the rows take, rounded up; none take nothing.
template <typename TimeNs>
int64_t mean_ns(const MeanRows& rows, const TimeNs& taken_ns) {
  const int64_t low = rows.whole == 0 ? 0 : taken_ns(rows.whole);
  if (rows.more == 0) {
    return low;
  }
  const Wide sum = Wide{low} * (rows.of - rows.more) +
                   Wide{taken_ns(rows.whole + 1)} * rows.more;
  return static_cast<int64_t>((sum + rows.of - 1) / rows.of);
}

// Without a rate 0, as of any transfer.
int64_t read_ns(const MeanRows& rows, int64_t sample_bytes, const Tier& tier) {
  return mean_ns(rows, [&](int64_t whole) {
    const Wide each = Wide{whole} * tier.record_ns;
    return transfer_ns(
        whole * sample_bytes,
        tier.bytes_per_s,
        static_cast<int64_t>(std::min<Wide>(each, kLongestTransferNs)));
  });
}

// Samples of the data set that the tier holds on all nodes.
int64_t held_samples(
    const Cluster& cluster,
    const Workload& workload,
    const Tier& tier,
    int64_t sample_bytes) {
  const int64_t all = workload.num_samples.value_or(kNeverFits);
  if (!tier.bytes || sample_bytes == 0) {
    return all;
  }
  const Wide held = Wide{*tier.bytes / sample_bytes} * cluster.num_nodes;
  return static_cast<int64_t>(std::min<Wide>(held, all));
}

// What a step reads, and the rows of a micro-batch that it computes.
struct Reads {
  MeanRows missed;
  int64_t wait_ns = 0;   // before the first forward
  int64_t ahead_ns = 0;  // alongside the step
};

// From host memory, and with `disk` what it has no room for from there: that is
// read ahead, and copied as records of host memory are.
Reads reads_of(
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape,
    int64_t sample_bytes,
    bool disk) {
  const bool below = disk && cluster.cache && cluster.cache->host_bytes > 0;
  const bool in_host = !disk || below;
  const Tier host = tier_of(cluster, CacheTier::kHost);
  const Tier lower = tier_of(cluster, CacheTier::kDisk);
  const int64_t in_memory =
      in_host ? held_samples(cluster, workload, host, sample_bytes) : 0;
  const int64_t all = workload.num_samples.value_or(kNeverFits);
  const int64_t on_disk =
      disk ? std::min(
                 held_samples(cluster, workload, lower, sample_bytes),
                 all - in_memory)
           : 0;
  const int64_t samples = samples_per_microbatch(workload.global_batch, shape);
  // In line every replica reads its own; else a node reads for all of its.
  const int64_t own = samples_per_replica(workload.global_batch, shape);
  const int64_t of_node = divide_up(workload.global_batch, cluster.num_nodes);
  // A set of unknown size is taken to be there, in memory if that has records.
  const bool known = workload.num_samples.has_value();
  const bool at_top = in_memory > 0 || on_disk == 0;
  const int64_t upper_part = known ? in_memory : at_top ? all : 0;
  const int64_t lower_part = known ? on_disk : all - upper_part;
  const int64_t served = upper_part + lower_part;
  Reads reads;
  reads.missed = share_of(samples, all - served, all);
  if (in_host && host.in_line) {
    reads.wait_ns = read_ns(share_of(own, served, all), sample_bytes, host);
  } else if (in_host) {
    reads.ahead_ns =
        read_ns(share_of(of_node, upper_part, all), sample_bytes, host);
  }
  if (on_disk > 0) {
    reads.ahead_ns = std::max(
        reads.ahead_ns,
        read_ns(share_of(of_node, lower_part, all), sample_bytes, lower));
  }
  return reads;
}

std::vector<int64_t>
frozen_times(const Profile& profile, int64_t boundary, const MeanRows& rows) {
  std::vector<int64_t> times;
  for (int64_t i = 0; i < boundary && rows.any(); ++i) {
    const auto& layer = profile.layers[static_cast<std::size_t>(i)];
    times.push_back(mean_ns(rows, [&](int64_t whole) {
      return interpolate(
          profile.microbatch_samples, layer.forward_only_ns, whole);
    }));
  }
  return times;
}

int64_t sum(const std::vector<int64_t>& values) {
  int64_t total = 0;
  for (const int64_t value : values) {
    total += value;
  }
  return total;
}

// Chunk per device, and the largest chunk's weights.
void place_pipelined(
    PrefixCosts& costs,
    const Profile& profile,
    const std::vector<int64_t>& times,
    const Cuts& cuts,
    int64_t num_devices) {
  const SpanCost cost(times);
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    costs.per_microbatch_ns.push_back(cost.layers(cuts[k], cuts[k + 1]));
    int64_t bytes = 0;
    for (int64_t i = cuts[k]; i < cuts[k + 1]; ++i) {
      bytes += profile.layers[static_cast<std::size_t>(i)].parameter_bytes;
    }
    costs.bytes = std::max(costs.bytes, bytes);
  }
  costs.per_microbatch_ns.resize(static_cast<std::size_t>(num_devices), 0);
}

}  // namespace

Cuts prefix_cuts(
    const Profile& profile,
    int64_t boundary,
    int64_t samples,
    int64_t num_devices) {
  const Rules rules{allowed_cuts(profile, 0, boundary), {}, {}};
  const auto& allowed = rules.cut_allowed;
  const int64_t most =
      1 + std::count(allowed.begin() + 1, allowed.end() - 1, 1);
  const SpanCost cost(frozen_times(profile, boundary, {samples}));
  return min_max(cost, rules, std::min(num_devices, most)).value().cuts;
}

bool has_tier(const Cluster& cluster, CacheTier tier) {
  if (tier == CacheTier::kNone || tier == CacheTier::kDevice) {
    return true;
  }
  return tier_of(cluster, tier).bytes.value_or(1) > 0;
}

PrefixCosts prefix_costs(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape,
    PrefixPlacement placement,
    CacheTier tier) {
  PrefixCosts costs;
  if (workload.boundary == 0) {
    return costs;
  }
  costs.placement = placement;
  const int64_t samples = samples_per_microbatch(workload.global_batch, shape);
  const int64_t sample_bytes =
      profile.layers[static_cast<std::size_t>(workload.boundary) - 1]
          .boundary_bytes_per_sample;
  MeanRows missed{samples};
  int64_t cached_bytes = 0;
  if (tier == CacheTier::kDevice) {
    // The data set's activations are spread over all devices that run.
    const int64_t devices = shape.num_stages * shape.num_replicas;
    const int64_t kept = divide_up(
        workload.num_samples.value_or(workload.global_batch), devices);
    cached_bytes = static_cast<int64_t>(
        std::min<Wide>(Wide{kept} * sample_bytes, kNeverFits));
    missed = {};
  } else if (tier != CacheTier::kNone) {
    const Reads reads = reads_of(
        cluster, workload, shape, sample_bytes, tier == CacheTier::kDisk);
    missed = reads.missed;
    costs.cache_wait_ns = reads.wait_ns;
    costs.cache_read_ns = reads.ahead_ns;
  }
  const std::vector<int64_t> times =
      frozen_times(profile, workload.boundary, missed);
  if (placement == PrefixPlacement::kPipelined) {
    const std::vector<int64_t> weighed =
        frozen_times(profile, workload.boundary, {samples});
    const Cuts cuts =
        prefix_cuts(profile, workload.boundary, samples, shape.num_stages);
    place_pipelined(costs, profile, weighed, cuts, shape.num_stages);
    if (missed.whole < samples) {  // the same chunks, for the rows that miss
      const int64_t whole = sum(weighed);
      for (int64_t& chunk : costs.per_microbatch_ns) {
        chunk = whole == 0
                    ? 0
                    : static_cast<int64_t>(Wide{chunk} * sum(times) / whole);
      }
    }
  } else {
    costs.per_microbatch_ns = {sum(times)};
    for (int64_t i = 0; i < workload.boundary; ++i) {
      costs.bytes +=
          profile.layers[static_cast<std::size_t>(i)].parameter_bytes;
    }
    const bool fills =
        placement == PrefixPlacement::kFilled && shape.num_stages > 1;
    if (fills && !times.empty()) {
      const auto grains = frozen_times(
          profile,
          workload.boundary,
          {missed.whole + (missed.more > 0 ? 1 : 0)});
      costs.grain_ns = *std::max_element(grains.begin(), grains.end());
      costs.bytes += static_cast<int64_t>(std::min<Wide>(
          Wide{sample_bytes} *
              samples_per_replica(workload.global_batch, shape),
          kNeverFits));
    }
  }
  costs.copy_ns = mean_ns(missed, [&](int64_t rows) {
    return transfer_ns(
        sample_bytes * rows,
        cluster.device_link_bytes_per_s,
        cluster.device_link_latency_ns);
  });
  costs.bytes += cached_bytes;
  return costs;
}

int64_t prefix_phase_ns(
    PrefixPlacement placement,
    const std::vector<int64_t>& prefix_ns,
    int64_t num_devices,
    int64_t num_microbatches) {
  switch (placement) {
    case PrefixPlacement::kNone:
    case PrefixPlacement::kFilled:
      return 0;
    case PrefixPlacement::kReplicated:
      return divide_up(num_microbatches, num_devices) * prefix_ns.front();
    case PrefixPlacement::kPipelined:
      break;
  }
  int64_t slowest = 0;
  for (const int64_t chunk : prefix_ns) {
    slowest = std::max(slowest, chunk);
  }
  return sum(prefix_ns) + (num_microbatches - 1) * slowest;
}

}  // namespace pipetransformer::planner
