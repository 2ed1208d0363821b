#include "planner/costs/step_model.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "planner/costs/all_reduce.h"

namespace pipetransformer::planner {

namespace {

Column sum_of(const Column& a, const Column& b) {
  Column sum = a;
  for (std::size_t i = 0; i < sum.size(); ++i) {
    sum[i] += b[i];
  }
  return sum;
}

SpanCost with_copies(const Column& layers, const Column& copies, bool serial) {
  return SpanCost(
      layers, copies, copies, serial ? Charges::kAdded : Charges::kOverlapped);
}

Column backward_of(const LayerCosts& layers, bool recompute) {
  Column backward = sum_of(layers.input_grad_ns, layers.weight_grad_ns);
  if (recompute) {
    const auto first = static_cast<std::size_t>(layers.num_forward_only);
    for (std::size_t i = first; i < backward.size(); ++i) {
      backward[i] += layers.forward_ns[i];
    }
  }
  return backward;
}

}  // namespace

StepModel::StepModel(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape,
    ScheduleKind schedule,
    PrefixPlacement prefix,
    CacheTier cache)
    : profile_(profile),
      cluster_(cluster),
      workload_(workload),
      shape_(shape),
      schedule_(schedule),
      layers_(layer_costs(profile, cluster, workload, shape)),
      prefix_(prefix_costs(profile, cluster, workload, shape, prefix, cache)),
      memory_(stage_memory(
          profile,
          cluster,
          workload,
          shape,
          schedule,
          prefix_.bytes)),
      serial_(workload.copies == CopyModel::kSerial),
      forward_(
          with_copies(layers_.forward_ns, layers_.forward_copy_ns, serial_)),
      input_grad_(with_copies(
          layers_.input_grad_ns,
          layers_.backward_copy_ns,
          serial_)),
      weight_grad_(layers_.weight_grad_ns),
      gradient_bytes_(layers_.gradient_bytes),
      backward_(with_copies(
          backward_of(layers_, num_recomputed(workload.checkpoint, shape) > 0),
          layers_.backward_copy_ns,
          serial_)),
      both_(with_copies(
          sum_of(
              layers_.forward_ns,
              backward_of(
                  layers_,
                  num_recomputed(workload.checkpoint, shape) > 0)),
          serial_ ? sum_of(layers_.forward_copy_ns, layers_.backward_copy_ns)
                  : layers_.forward_copy_ns,
          serial_)) {}

Column StepModel::cut_ns() const {
  return sum_of(backward_cut_ns(), once_per_cut(layers_.forward_copy_ns));
}

Column StepModel::backward_cut_ns() const {
  return once_per_cut(layers_.backward_copy_ns);
}

Column StepModel::once_per_cut(const Column& copies) const {
  return serial_ ? sum_of(copies, copies) : copies;
}

StepCosts StepModel::step(const Cuts& cuts) const {
  StepCosts costs;
  costs.schedule = schedule_;
  costs.num_microbatches = shape_.num_microbatches;
  costs.num_recomputed = num_recomputed(workload_.checkpoint, shape_);
  costs.prefix_placement = prefix_.placement;
  costs.prefix_ns = prefix_.per_microbatch_ns;
  costs.prefix_grain_ns = prefix_.grain_ns;
  costs.prefix_copy_ns = prefix_.copy_ns;
  costs.cache_read_ns = prefix_.cache_read_ns;
  costs.cache_wait_ns = prefix_.cache_wait_ns;
  costs.cores_permille = cluster_.cores_permille;
  costs.replicas_per_node = replicas_per_node(cluster_, shape_);
  costs.process_ns =
      cluster_.step_ns +
      samples_per_replica(workload_.global_batch, shape_) * cluster_.row_ns +
      layers_.optimizer_ns / workload_.accumulation_steps;
  costs.accumulation_steps = workload_.accumulation_steps;
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    const int64_t begin = cuts[k];
    const int64_t end = cuts[k + 1];
    StageCosts stage;
    stage.forward_ns = forward_.span(begin, end);
    stage.has_backward = end > layers_.num_forward_only;
    if (stage.has_backward) {
      stage.input_grad_ns = input_grad_.span(begin, end);
      stage.weight_grad_ns = weight_grad_.span(begin, end);
      if (costs.num_recomputed > 0) {
        // Where no gradient goes, nothing is computed again.
        stage.recompute_ns = backward_.span(begin, end) - stage.input_grad_ns -
                             stage.weight_grad_ns;
      }
      stage.all_reduce_ns = delivered_all_reduce_ns(begin, end);
      stage.network_all_reduce_ns = std::min(
          stage.all_reduce_ns,
          network_all_reduce_ns(
              gradient_bytes_.layers(begin, end), cluster_, shape_));
    }
    if (!serial_) {
      stage.forward_copy_ns =
          layers_.forward_copy_ns[static_cast<std::size_t>(end)];
      stage.backward_copy_ns =
          layers_.backward_copy_ns[static_cast<std::size_t>(begin)];
    }
    const KeptBytes kept = kept_bytes(profile_, workload_, shape_, begin, end);
    stage.state_bytes =
        memory_.fixed +
        state_bytes(profile_, cluster_, workload_.boundary, begin, end);
    stage.kept_bytes = kept.kept;
    stage.recomputed_bytes = kept.recomputed;
    stage.kept_for_weights_bytes = kept.for_weights;
    stage.shared_bytes = kept.shared;
    if (stage.has_backward) {
      const FurtherGradients further =
          further_gradients(profile_, workload_, shape_, begin, end);
      stage.summed_gradient_bytes = further.sums;
      stage.passing_gradient_bytes = further.passing;
    }
    costs.stages.push_back(stage);
  }
  return costs;
}

// A stage delivers its gradients at its end. A plain module (K=1, M=1) delivers
// them bucket by bucket: what is left after its backward is what does not hide
// behind it, and the last bucket at least. On cores that replicas share nothing
// hides: what adds up gradients takes the time from the backward.
int64_t StepModel::delivered_all_reduce_ns(int64_t begin, int64_t end) const {
  const int64_t bytes = gradient_bytes_.layers(begin, end);
  const int64_t whole = all_reduce_ns(bytes, cluster_, shape_);
  const bool shares =
      cluster_.replica_link_bytes_per_s && cluster_.cores_permille > 0;
  if (shape_.num_stages > 1 || shape_.num_microbatches > 1 || shares) {
    return whole;
  }
  const int64_t last_bucket =
      all_reduce_ns(std::min(bytes, kBucketBytes), cluster_, shape_);
  return std::max(whole - backward_.layers(begin, end), last_bucket);
}

StepCosts step_costs(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Choice& choice) {
  Cuts cuts = choice.cuts;
  for (int64_t& cut : cuts) {
    cut -= workload.boundary;
  }
  return StepModel(
             profile,
             cluster,
             workload,
             choice.shape,
             choice.schedule,
             choice.prefix,
             choice.cache)
      .step(cuts);
}

}  // namespace pipetransformer::planner
