#include "planner/transition/pause.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace pipetransformer::planner {

namespace {

using Wide = __int128;

constexpr int64_t kMostPauseNs = int64_t{1} << 62;
constexpr int64_t kPauseNsPerSecond = 1'000'000'000;

// Medians of 4 processes on 2 cores over gloo, before anything was measured.
constexpr int64_t kPrepareNs = 5'000'000;
constexpr int64_t kGroupNs = 20'000'000;
constexpr int64_t kRewireNs = 10'000'000;
constexpr int64_t kFirstStepNs = 5'000'000;
constexpr int64_t kUnmeasuredBytesPerS = 100'000'000;

int64_t saturated(Wide value) {
  return static_cast<int64_t>(std::min<Wide>(value, kMostPauseNs));
}

int64_t mean_or(const RunningMean& mean, int64_t otherwise) {
  // Rounded up, as all prices.
  return mean.count == 0 ? otherwise
                         : (mean.sum_ns + mean.count - 1) / mean.count;
}

int64_t over_link(
    int64_t bytes,
    const std::optional<int64_t>& bytes_per_s,
    int64_t latency_ns) {
  if (bytes == 0 || !bytes_per_s) {
    return 0;
  }
  const Wide time =
      (Wide{bytes} * kPauseNsPerSecond + *bytes_per_s - 1) / *bytes_per_s;
  return saturated(time + latency_ns);
}

int64_t hand_over_ns(
    const RunningMean& measured,
    const Cluster& cluster,
    const Moves& moves) {
  const int64_t bytes = moves.replica_bytes;
  if (bytes == 0) {
    return 0;
  }
  if (measured.count > 0) {
    return saturated(
        (Wide{bytes} * measured.sum_ns + measured.count - 1) / measured.count);
  }
  const auto over = [bytes](const auto& bytes_per_s, int64_t latency_ns) {
    const int64_t rate = bytes_per_s.value_or(kUnmeasuredBytesPerS);
    return over_link(bytes, rate, latency_ns);
  };
  if (moves.across_nodes) {
    return over(cluster.network_bytes_per_s, cluster.network_latency_ns);
  }
  if (!cluster.device_link_bytes_per_s && cluster.replica_link_bytes_per_s) {
    return over(
        cluster.replica_link_bytes_per_s, cluster.replica_link_latency_ns);
  }
  return over(cluster.device_link_bytes_per_s, cluster.device_link_latency_ns);
}

}  // namespace

RunningMean observed(const RunningMean& mean, int64_t ns, int64_t per) {
  if (ns < 0 || per < 1) {
    throw std::invalid_argument(
        "measured pause: expected at least 0 ns per at least 1, got " +
        std::to_string(ns) + " per " + std::to_string(per));
  }
  if (mean.sum_ns < 0 || mean.count < 0 || ns > kMostPauseNs - mean.sum_ns ||
      per > kMostPauseNs - mean.count) {
    throw std::invalid_argument(
        "measured pause: expected sums of 0 to 2^62, got " +
        std::to_string(ns) + " after " + std::to_string(mean.sum_ns) +
        " over " + std::to_string(mean.count));
  }
  return {mean.sum_ns + ns, mean.count + per};
}

int64_t Pause::total_ns() const {
  return saturated(
      Wide{prepare_ns} + move_ns + rewire_ns + first_step_ns + cache_ns);
}

Pause predicted_pause(
    const PauseModel& model,
    const Cluster& cluster,
    TransitionKind kind,
    const Moves& moves,
    int64_t cache_bytes) {
  Pause pause;
  if (kind == TransitionKind::kNone) {
    return pause;
  }
  pause.prepare_ns = kind == TransitionKind::kShape
                         ? mean_or(model.group, kGroupNs)
                         : mean_or(model.prepare, kPrepareNs);
  pause.move_ns = saturated(
      Wide{mean_or(model.compare, 0)} +
      hand_over_ns(model.move, cluster, moves) +
      over_link(
          moves.device_bytes,
          cluster.device_link_bytes_per_s,
          cluster.device_link_latency_ns));
  pause.rewire_ns = mean_or(model.rewire, kRewireNs);
  pause.first_step_ns = mean_or(model.first_step, kFirstStepNs);
  pause.cache_ns = over_link(
      cache_bytes,
      cluster.device_link_bytes_per_s,
      cluster.device_link_latency_ns);
  return pause;
}

}  // namespace pipetransformer::planner
