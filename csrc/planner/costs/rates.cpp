#include "planner/costs/rates.h"

#include <algorithm>
#include <cstddef>

namespace pipetransformer::planner {

namespace {

using Wide = __int128;

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;

}  // namespace

int64_t interpolate(
    const std::vector<int64_t>& points,
    const std::vector<int64_t>& values,
    int64_t samples) {
  if (points.size() == 1) {
    // In proportion, rounded up: parts must not seem quicker than the whole.
    const Wide scaled = Wide{values[0]} * samples + points[0] - 1;
    return static_cast<int64_t>(scaled / points[0]);
  }
  // The segment that holds `samples`, the outer ones extended.
  const auto upper = std::upper_bound(points.begin(), points.end(), samples);
  const auto right = static_cast<std::size_t>(std::clamp<std::ptrdiff_t>(
      upper - points.begin(),
      1,
      static_cast<std::ptrdiff_t>(points.size()) - 1));
  const std::size_t left = right - 1;
  Wide rise = Wide{values[right]} - values[left];
  if (samples > points[right]) {
    rise = std::max<Wide>(rise, 0);
    return static_cast<int64_t>(
        values[right] +
        rise * (samples - points[right]) / (points[right] - points[left]));
  }
  // Only an extension below the first point can be negative.
  const Wide span = points[right] - points[left];
  const Wide scaled =
      Wide{values[left]} * span + rise * (samples - points[left]);
  return scaled <= 0 ? 0 : static_cast<int64_t>(scaled / span);
}

int64_t interpolate_parts(
    const std::vector<int64_t>& points,
    const std::vector<int64_t>& values,
    int64_t samples,
    int64_t num_parts) {
  const int64_t smaller = samples / num_parts;
  const int64_t num_larger = samples % num_parts;
  const int64_t first = interpolate(points, values, smaller);
  if (num_larger == 0) {
    return first;
  }
  const Wide total =
      Wide{first} * (num_parts - num_larger) +
      Wide{interpolate(points, values, smaller + 1)} * num_larger;
  return static_cast<int64_t>((total + num_parts - 1) / num_parts);
}

int64_t transfer_ns(
    int64_t bytes,
    const std::optional<int64_t>& bytes_per_s,
    int64_t latency_ns) {
  if (!bytes_per_s) {
    return 0;
  }
  const Wide time =
      (Wide{bytes} * kNanosecondsPerSecond + *bytes_per_s - 1) / *bytes_per_s +
      latency_ns;
  return static_cast<int64_t>(std::min<Wide>(time, kLongestTransferNs));
}

int64_t
on_cores_ns(__int128 work_ns, int64_t cores_permille, int64_t num_members) {
  return cores_permille == 0
             ? 0
             : static_cast<int64_t>(
                   work_ns * num_members * 1000 / cores_permille);
}

}  // namespace pipetransformer::planner
