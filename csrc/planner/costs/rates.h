// Time as a function of size: measured costs between their points, transfers
// from latency and rate. Pure, int64 nanoseconds, thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace pipetransformer::planner {

// Value at `samples` of a cost measured at `points`: affine between and beyond
// the points (never below 0, never falling beyond the last); a single point
// means proportional. Rounded down.
int64_t interpolate(
    const std::vector<int64_t>& points,
    const std::vector<int64_t>& values,
    int64_t samples);

// Mean of `interpolate` over the parts when `samples` are cut into `num_parts`
// that differ by at most one sample; at least one sample for each. Rounded up:
// unequal parts gain nothing over equal ones by rounding.
int64_t interpolate_parts(
    const std::vector<int64_t>& points,
    const std::vector<int64_t>& values,
    int64_t samples,
    int64_t num_parts);

// Transfers that take longer, 18 minutes, are taken to last as long: sums of
// them stay in range, and no plan that can do without them is chosen.
inline constexpr int64_t kLongestTransferNs = int64_t{1} << 40;

// latency + bytes / rate, rounded up; 0 without a rate.
int64_t transfer_ns(
    int64_t bytes,
    const std::optional<int64_t>& bytes_per_s,
    int64_t latency_ns);

// What so much work of each member takes on the cores that they share, in
// thousandths, when there are too few; 0 where they share none.
int64_t
on_cores_ns(__int128 work_ns, int64_t cores_permille, int64_t num_members);

}  // namespace pipetransformer::planner
