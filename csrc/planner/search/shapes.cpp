#include "planner/search/shapes.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <numeric>

namespace pipetransformer::planner {

namespace {

constexpr int64_t kLargestFactor = 6;  // of M over K, as in the paper
constexpr std::size_t kMostCounts = 8;

}  // namespace

std::vector<int64_t> replica_counts(
    const Request& request,
    const Cluster& cluster,
    int64_t num_stages) {
  const int64_t fitting =
      cluster.num_nodes * (cluster.devices_per_node / num_stages);
  const int64_t allowed =
      std::min(fitting, request.max_replicas.value_or(fitting));
  const int64_t most = request.workload.global_batch /
                       request.num_microbatches.value_or(1) /
                       request.min_microbatch_samples;
  int64_t count = std::min(allowed, std::max(most, request.min_replicas));
  std::vector<int64_t> counts{count};
  while (!request.all_replicas && count > request.min_replicas) {
    count = std::max(count / 2, request.min_replicas);
    counts.push_back(count);
  }
  return counts;
}

std::vector<int64_t> stage_counts(
    const Request& request,
    const Profile& profile,
    const Cluster& cluster) {
  if (request.cuts) {
    return {static_cast<int64_t>(request.cuts->size()) - 1};
  }
  if (request.num_stages) {
    return {*request.num_stages};
  }
  const int64_t num_active = profile.num_layers() - request.workload.boundary;
  std::vector<int64_t> counts(
      static_cast<std::size_t>(std::min(cluster.devices_per_node, num_active)));
  std::iota(counts.begin(), counts.end(), 1);
  return counts;
}

std::vector<int64_t> microbatch_counts(
    const Request& request,
    int64_t num_stages,
    int64_t num_replicas) {
  if (request.num_microbatches) {
    return {*request.num_microbatches};
  }
  std::vector<int64_t> counts;
  const int64_t batch = request.workload.global_batch;
  const int64_t most = batch / num_replicas / request.min_microbatch_samples;
  if (request.finer_microbatches) {
    const int64_t coarse = kLargestFactor * num_stages;
    for (int64_t count = 2 * coarse; count < most; count *= 2) {
      counts.push_back(count);
    }
    if (most > coarse) {
      counts.push_back(most);
    }
    return counts;
  }
  for (int64_t factor = 1; factor <= kLargestFactor; ++factor) {
    counts.push_back(factor * num_stages);
  }
  if (most > 0 && most < num_stages) {
    return {most};  // fewer rows than stages: as many as there can be
  }
  std::vector<int64_t> divisors;
  if (batch % num_replicas == 0) {
    for (int64_t m = num_stages; m <= counts.back(); ++m) {
      if (m % num_stages != 0 && batch / num_replicas % m == 0) {
        divisors.push_back(m);
      }
    }
  }
  std::stable_sort(
      divisors.begin(), divisors.end(), [num_stages](int64_t a, int64_t b) {
        return std::abs(a - 3 * num_stages) < std::abs(b - 3 * num_stages);
      });
  divisors.resize(std::min(divisors.size(), kMostCounts - counts.size()));
  counts.insert(counts.end(), divisors.begin(), divisors.end());
  std::sort(counts.begin(), counts.end());
  return counts;
}

bool fills_microbatches(const Request& request, const Shape& shape) {
  const int64_t fewest = request.workload.global_batch / shape.num_replicas /
                         shape.num_microbatches;
  return fewest >= request.min_microbatch_samples &&
         shape.num_microbatches <= kMostCells / shape.num_stages;
}

}  // namespace pipetransformer::planner
