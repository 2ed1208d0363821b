#include "planner/costs/layer_costs.h"

#include <algorithm>
#include <cstddef>

#include "planner/costs/rates.h"

namespace pipetransformer::planner {

namespace {

// Copy time per micro-batch at each inner boundary, from `first` on.
Column copy_times(
    const Profile& profile,
    const Cluster& cluster,
    int64_t boundary,
    int64_t first,
    int64_t samples) {
  const int64_t num_active = profile.num_layers() - boundary;
  Column times(static_cast<std::size_t>(num_active) + 1, 0);
  for (int64_t j = std::max<int64_t>(1, first); j < num_active; ++j) {
    const auto before = static_cast<std::size_t>(boundary + j - 1);
    times[static_cast<std::size_t>(j)] = transfer_ns(
        profile.layers[before].boundary_bytes_per_sample * samples,
        cluster.device_link_bytes_per_s,
        cluster.device_link_latency_ns);
  }
  return times;
}

}  // namespace

int64_t num_forward_only(const Profile& profile, int64_t boundary) {
  int64_t count = 0;
  while (
      boundary + count < profile.num_layers() &&
      !profile.layers[static_cast<std::size_t>(boundary + count)].trainable) {
    ++count;
  }
  return count;
}

// Note [Backward of the first trainable layer]
// Layers without a trainable parameter at or before them get no gradient. The
// first layer that does get one need not pass it on: its first operation drops
// the input gradient, measured on transformer blocks as a third of the forward
// time. Later layers without a trainable parameter pass the gradient on and
// save the weight gradient.
//
// Note [Unequal micro-batches]
// Sizes of micro-batches differ by at most one row. A step takes about as long
// as with equal ones of the mean time: the slowest stage runs all of them, and
// only the ramps, one micro-batch long, depend on which are the larger ones.
// Timing every micro-batch like the largest would make a step of 32 rows in 10
// parts as long as one of 40 rows.
LayerCosts layer_costs(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape) {
  const int64_t share = samples_per_replica(workload.global_batch, shape);
  const auto time_of = [&](const Column& values) {
    return interpolate_parts(
        profile.microbatch_samples, values, share, shape.num_microbatches);
  };
  LayerCosts costs;
  costs.num_forward_only = num_forward_only(profile, workload.boundary);
  for (int64_t i = workload.boundary; i < profile.num_layers(); ++i) {
    const LayerProfile& layer = profile.layers[static_cast<std::size_t>(i)];
    const int64_t from_first = i - workload.boundary - costs.num_forward_only;
    const int64_t forward = time_of(layer.forward_ns);
    int64_t input_grad = 0;
    if (from_first >= 0) {
      input_grad = time_of(layer.input_grad_ns);
    }
    if (from_first == 0) {
      input_grad = std::max<int64_t>(0, input_grad - forward / 3);
    }
    costs.forward_ns.push_back(forward);
    costs.input_grad_ns.push_back(input_grad);
    costs.weight_grad_ns.push_back(
        layer.trainable ? time_of(layer.weight_grad_ns) : 0);
    costs.gradient_bytes.push_back(layer.trainable_bytes);
    costs.optimizer_ns += layer.optimizer_ns;
  }
  const int64_t samples = samples_per_microbatch(workload.global_batch, shape);
  // Gradients cross only the boundaries behind the first trainable layer.
  costs.forward_copy_ns =
      copy_times(profile, cluster, workload.boundary, 1, samples);
  costs.backward_copy_ns = copy_times(
      profile, cluster, workload.boundary, costs.num_forward_only + 1, samples);
  return costs;
}

}  // namespace pipetransformer::planner
