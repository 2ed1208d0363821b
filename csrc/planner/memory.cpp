#include "planner/memory.h"

#include <cmath>
#include <cstddef>
#include <vector>

namespace pipetransformer::planner {

namespace {

int64_t state_bytes(const LayerProfile& layer, const Cluster& cluster) {
  if (!layer.trainable) {
    return layer.parameter_bytes;
  }
  const auto optimizer = static_cast<int64_t>(std::ceil(
      static_cast<double>(layer.parameter_bytes) *
      cluster.optimizer_bytes_per_parameter_byte));
  return 2 * layer.parameter_bytes + optimizer;
}

}  // namespace

int64_t
fixed_bytes(const Profile& profile, const Cluster& cluster, int64_t boundary) {
  int64_t bytes = cluster.context_bytes;
  for (int64_t i = 0; i < boundary; ++i) {
    bytes += profile.layers[static_cast<std::size_t>(i)].parameter_bytes;
  }
  return bytes;
}

SpanCost stage_bytes(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape) {
  const bool recompute = recomputes(workload.checkpoint, shape);
  const int64_t samples = samples_per_replica(workload.global_batch, shape);
  const int64_t held =
      recompute ? samples_per_microbatch(workload.global_batch, shape)
                : samples;
  const int64_t forward_only = num_forward_only(profile, workload.boundary);
  const int64_t num_active = profile.num_layers() - workload.boundary;
  std::vector<int64_t> layers;
  std::vector<int64_t> inputs(static_cast<std::size_t>(num_active) + 1, 0);
  for (int64_t i = 0; i < num_active; ++i) {
    const auto index = static_cast<std::size_t>(workload.boundary + i);
    const LayerProfile& layer = profile.layers[index];
    // No gradient passes the leading layers that the user froze.
    const int64_t saved =
        i < forward_only ? 0 : layer.activation_bytes_per_sample * held;
    layers.push_back(state_bytes(layer, cluster) + saved);
    if (recompute && index > 0) {
      inputs[static_cast<std::size_t>(i)] =
          profile.layers[index - 1].boundary_bytes_per_sample * samples;
    }
  }
  return SpanCost(
      layers,
      std::move(inputs),
      std::vector<int64_t>(static_cast<std::size_t>(num_active) + 1, 0));
}

}  // namespace pipetransformer::planner
