#include "planner/cost.h"

#include <algorithm>
#include <cstddef>

#include "planner/rates.h"

namespace pipetransformer::planner {

namespace {

using Wide = __int128;

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;
constexpr int64_t kLongestTransferNs = int64_t{1} << 53;  // 104 days
// DDP reduces the last bucket only after the backward has ended.
constexpr int64_t kBucketBytes = int64_t{25} << 20;

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

const LayerProfile& layer_at(const Profile& profile, int64_t index) {
  return profile.layers[static_cast<std::size_t>(index)];
}

std::vector<int64_t>
forward_times(const Profile& profile, int64_t boundary, int64_t samples) {
  std::vector<int64_t> times;
  for (int64_t i = boundary; i < profile.num_layers(); ++i) {
    times.push_back(interpolate(
        profile.microbatch_samples, layer_at(profile, i).forward_ns, samples));
  }
  return times;
}

// Note [Backward of the first trainable layer]
// Layers without a trainable parameter at or before them get no gradient. The
// first layer that does get one need not pass it on: its first operation drops
// the input gradient, measured on transformer blocks as a third of the forward
// time. Later layers without a trainable parameter pass the gradient on and
// save the weight gradient.
std::vector<int64_t> backward_times(
    const Profile& profile,
    const Workload& workload,
    const std::vector<int64_t>& forward,
    bool recompute,
    int64_t samples) {
  const auto& points = profile.microbatch_samples;
  const int64_t forward_only = num_forward_only(profile, workload.boundary);
  std::vector<int64_t> times(forward.size(), 0);
  for (std::size_t i = static_cast<std::size_t>(forward_only); i < times.size();
       ++i) {
    const LayerProfile& layer =
        layer_at(profile, workload.boundary + static_cast<int64_t>(i));
    int64_t input_grad = interpolate(points, layer.input_grad_ns, samples);
    if (static_cast<int64_t>(i) == forward_only) {
      input_grad = std::max<int64_t>(0, input_grad - forward[i] / 3);
    }
    times[i] = input_grad + (recompute ? forward[i] : 0);
    if (layer.trainable) {
      times[i] += interpolate(points, layer.weight_grad_ns, samples);
    }
  }
  return times;
}

// Copy time per micro-batch at each inner boundary, from `first` on.
std::vector<int64_t> copy_times(
    const Profile& profile,
    const Cluster& cluster,
    int64_t boundary,
    int64_t first,
    int64_t samples) {
  const int64_t num_active = profile.num_layers() - boundary;
  std::vector<int64_t> times(static_cast<std::size_t>(num_active) + 1, 0);
  for (int64_t j = std::max<int64_t>(1, first); j < num_active; ++j) {
    const int64_t bytes =
        layer_at(profile, boundary + j - 1).boundary_bytes_per_sample * samples;
    times[static_cast<std::size_t>(j)] = transfer_ns(
        bytes, cluster.device_link_bytes_per_s, cluster.device_link_latency_ns);
  }
  return times;
}

SpanCost with_copies(
    const std::vector<int64_t>& layers,
    const std::vector<int64_t>& copies) {
  return SpanCost(layers, copies, copies);
}

SpanCost forward_cost(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    int64_t samples) {
  return with_copies(
      forward_times(profile, workload.boundary, samples),
      copy_times(profile, cluster, workload.boundary, 1, samples));
}

// Gradients cross only the boundaries behind the first trainable layer.
SpanCost backward_cost(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    bool recompute,
    int64_t samples) {
  const auto forward = forward_times(profile, workload.boundary, samples);
  const int64_t first = num_forward_only(profile, workload.boundary) + 1;
  return with_copies(
      backward_times(profile, workload, forward, recompute, samples),
      copy_times(profile, cluster, workload.boundary, first, samples));
}

SpanCost gradient_bytes(const Profile& profile, int64_t boundary) {
  std::vector<int64_t> bytes;
  for (int64_t i = boundary; i < profile.num_layers(); ++i) {
    const LayerProfile& layer = layer_at(profile, i);
    bytes.push_back(layer.trainable ? layer.parameter_bytes : 0);
  }
  return SpanCost(bytes);
}

// The K devices of a replica share the prefix's micro-batches.
int64_t prefix_time(
    const Profile& profile,
    const Workload& workload,
    const Shape& shape,
    int64_t samples) {
  if (workload.prefix_cached) {
    return 0;
  }
  int64_t per_microbatch = 0;
  for (int64_t i = 0; i < workload.boundary; ++i) {
    per_microbatch += interpolate(
        profile.microbatch_samples,
        layer_at(profile, i).forward_only_ns,
        samples);
  }
  return divide_up(per_microbatch * shape.num_microbatches, shape.num_stages);
}

// A ring moves 2 (n-1)/n of the bytes over each link.
int64_t ring_ns(
    int64_t bytes,
    int64_t num_members,
    const std::optional<int64_t>& bytes_per_s,
    int64_t latency_ns) {
  if (num_members < 2) {
    return 0;
  }
  const Wide moved = Wide{2} * (num_members - 1) * bytes / num_members;
  return transfer_ns(static_cast<int64_t>(moved), bytes_per_s, latency_ns);
}

}  // namespace

int64_t samples_per_replica(int64_t global_batch, const Shape& shape) {
  return divide_up(global_batch, shape.num_replicas);
}

int64_t samples_per_microbatch(int64_t global_batch, const Shape& shape) {
  return divide_up(
      samples_per_replica(global_batch, shape), shape.num_microbatches);
}

int64_t num_forward_only(const Profile& profile, int64_t boundary) {
  int64_t count = 0;
  while (boundary + count < profile.num_layers() &&
         !layer_at(profile, boundary + count).trainable) {
    ++count;
  }
  return count;
}

bool recomputes(Checkpoint checkpoint, const Shape& shape) {
  // A lone micro-batch is the last one. With several, all are charged: only
  // the last cell of each stage escapes, and it is off the critical path.
  return checkpoint == Checkpoint::kAlways ||
         (checkpoint == Checkpoint::kExceptLast && shape.num_microbatches > 1);
}

StepCost::StepCost(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape)
    : cluster_(cluster),
      shape_(shape),
      forward_(forward_cost(
          profile,
          cluster,
          workload,
          samples_per_microbatch(workload.global_batch, shape))),
      backward_(backward_cost(
          profile,
          cluster,
          workload,
          recomputes(workload.checkpoint, shape),
          samples_per_microbatch(workload.global_batch, shape))),
      gradient_bytes_(gradient_bytes(profile, workload.boundary)),
      prefix_ns_(prefix_time(
          profile,
          workload,
          shape,
          samples_per_microbatch(workload.global_batch, shape))) {}

int64_t StepCost::step_ns(const Cuts& cuts) const {
  const int64_t n = forward_.num_layers();
  int64_t step = prefix_ns_ + forward_.layers(0, n) + backward_.layers(0, n);
  for (std::size_t k = 1; k + 1 < cuts.size(); ++k) {
    step += forward_.entry(cuts[k]) + backward_.entry(cuts[k]);
  }
  step += (shape_.num_microbatches - 1) *
          (largest_stage(forward_, cuts) + largest_stage(backward_, cuts));
  return step + exposed_all_reduce_ns(cuts);
}

int64_t StepCost::all_reduce_ns(int64_t bytes) const {
  const int64_t per_node =
      std::max<int64_t>(1, cluster_.devices_per_node / shape_.num_stages);
  const int64_t in_node = std::min(per_node, shape_.num_replicas);
  const int64_t nodes = divide_up(shape_.num_replicas, per_node);
  if (bytes == 0) {
    return 0;
  }
  return ring_ns(
             bytes,
             in_node,
             cluster_.device_link_bytes_per_s,
             cluster_.device_link_latency_ns) +
         ring_ns(
             bytes,
             nodes,
             cluster_.network_bytes_per_s,
             cluster_.network_latency_ns);
}

// A stage delivers its gradients once, after its last backward; its all-reduce
// hides behind the backward of the stages before it. A plain module (K=1, M=1)
// hides all but DDP's last bucket behind its own backward.
int64_t StepCost::exposed_all_reduce_ns(const Cuts& cuts) const {
  int64_t exposed = 0;
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    const int64_t bytes = gradient_bytes_.stage(cuts[k], cuts[k + 1]);
    const int64_t slack = backward_.layers(0, cuts[k]);
    exposed = std::max(exposed, all_reduce_ns(bytes) - slack);
  }
  if (shape_.num_stages == 1 && shape_.num_microbatches == 1) {
    const int64_t n = forward_.num_layers();
    const int64_t bytes = gradient_bytes_.stage(0, n);
    return std::max(
        all_reduce_ns(bytes) - backward_.layers(0, n),
        all_reduce_ns(std::min(bytes, kBucketBytes)));
  }
  return exposed;
}

}  // namespace pipetransformer::planner
