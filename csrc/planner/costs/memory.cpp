#include "planner/costs/memory.h"

#include <algorithm>
#include <cstddef>

#include "planner/costs/layer_costs.h"

namespace pipetransformer::planner {

namespace {

const LayerProfile& layer_at(const Profile& profile, int64_t index) {
  return profile.layers[static_cast<std::size_t>(index)];
}

// Weights; of those that train also gradients and moments.
int64_t state_of(const LayerProfile& layer, const Cluster& cluster) {
  return layer.parameter_bytes + layer.trainable_bytes +
         optimizer_bytes(layer, cluster);
}

// Of the active layer `index`, per micro-batch but for what all share; no
// gradient passes the leading layers that the user froze, so they keep nothing.
struct Kept {
  int64_t whole = 0;
  int64_t for_weights = 0;
  int64_t shared = 0;  // by all micro-batches
};

Kept kept_of(
    const Profile& profile,
    int64_t boundary,
    int64_t forward_only,
    int64_t index,
    int64_t samples) {
  if (index < forward_only) {
    return {};
  }
  const LayerProfile& layer = layer_at(profile, boundary + index);
  const int64_t for_any_rows = layer.activation_bytes_per_microbatch;
  return {
      layer.activation_bytes_per_sample * samples + for_any_rows,
      layer.weight_grad_activation_bytes_per_sample * samples + for_any_rows,
      layer.shared_activation_bytes};
}

int64_t input_bytes(
    const Profile& profile,
    int64_t boundary,
    int64_t begin,
    int64_t samples) {
  const int64_t index = boundary + begin;
  return index == 0
             ? 0
             : layer_at(profile, index - 1).boundary_bytes_per_sample * samples;
}

}  // namespace

std::vector<int64_t> in_flight(ScheduleKind schedule, const Shape& shape) {
  std::vector<int64_t> counts;
  for (int64_t k = 0; k < shape.num_stages; ++k) {
    counts.push_back(
        schedule == ScheduleKind::kGPipe
            ? shape.num_microbatches
            : std::min(shape.num_microbatches, shape.num_stages - k));
  }
  return counts;
}

// Note [What a stage keeps]
// From F to B a stage keeps the activations (a) of `in_flight` micro-batches.
// With recomputation it keeps their inputs, and the activations of one between
// R and B. With `except_last` the last micro-batch keeps its own from F on:
// GPipe runs its B first, before any R; 1F1B and ZB-H1 run other micro-batches'
// R and B in between, so there (on stages before the last) it is two. ZB-H1
// lets W lag, on every stage, until F to W holds min(M, K) micro-batches: those
// beyond the in-flight ones keep what W still needs (a_w). The frozen prefix
// has run for the whole batch before the first F: on the first stage its
// outputs wait for the micro-batches that are not yet in flight. All
// micro-batches are charged with the rows of the largest. What a layer saves
// once for all of them, as autocast's casts of its weights, is there
// throughout.
//
// Note [Gradients beside gradients]
// A plain module (K=1, M=1) leaves each gradient where it belongs. A pipeline
// adds them up over micro-batches and hands them over at the stage's end. With
// DDP that is into buckets which are always there (and are those of the state),
// and where batches share an optimizer step into what those before have left:
// the sums come on top, from the end of the first backward on. And backward
// gives the gradients of one micro-batch of a stage together: from the second
// on they stand beside the sums until they are added, when the micro-batch's
// activations are gone, recomputed ones and what its W needed among them. At
// those two points 1F1B and ZB-H1 hold as many micro-batches as ever, as long
// as forwards are left to run; else those whose backward is over are gone.
StageMemory stage_memory(
    const Profile& profile,
    const Cluster& cluster,
    const Workload& workload,
    const Shape& shape,
    ScheduleKind schedule,
    int64_t prefix_bytes) {
  const bool recompute = num_recomputed(workload.checkpoint, shape) > 0;
  const int64_t samples = samples_per_microbatch(workload.global_batch, shape);
  const int64_t boundary = workload.boundary;
  const int64_t forward_only = num_forward_only(profile, boundary);
  const int64_t num_active = profile.num_layers() - boundary;
  const bool split = schedule == ScheduleKind::kZbH1;
  const bool last_beside_another =
      workload.checkpoint == Checkpoint::kExceptLast &&
      schedule != ScheduleKind::kGPipe && shape.num_stages > 1;
  const int64_t computed_again = recompute ? (last_beside_another ? 2 : 1) : 0;
  const int64_t lagging = std::min(shape.num_microbatches, shape.num_stages);
  std::vector<Kept> kept_by;
  std::vector<int64_t> base;
  std::vector<int64_t> per_microbatch;
  std::vector<int64_t> inputs(static_cast<std::size_t>(num_active) + 1, 0);
  for (int64_t i = 0; i < num_active; ++i) {
    const Kept kept = kept_of(profile, boundary, forward_only, i, samples);
    kept_by.push_back(kept);
    int64_t constant =
        state_of(layer_at(profile, boundary + i), cluster) + kept.shared;
    int64_t repeated = recompute ? 0 : kept.whole;
    if (split) {
      // One of those that lag may be recomputed: then it keeps all, see below.
      constant += (lagging - (recompute ? 1 : 0)) * kept.for_weights;
      repeated = std::max<int64_t>(0, repeated - kept.for_weights);
    }
    base.push_back(constant + computed_again * kept.whole);
    per_microbatch.push_back(repeated);
    if (recompute) {
      inputs[static_cast<std::size_t>(i)] =
          input_bytes(profile, boundary, i, samples);
    }
  }
  StageMemory memory{
      cluster.context_bytes + prefix_bytes,
      SpanCost(
          per_microbatch,
          std::move(inputs),
          std::vector<int64_t>(static_cast<std::size_t>(num_active) + 1, 0)),
      {{SpanCost(base), in_flight(schedule, shape)}}};
  const FurtherGradients further =
      further_gradients(profile, workload, shape, 0, num_active);
  // `over`: backwards of micro-batches that have come to their end by then.
  const auto add_point = [&](int64_t copies, int64_t over) {
    std::vector<int64_t> layers;
    for (int64_t i = 0; i < num_active; ++i) {
      const auto index = static_cast<std::size_t>(i);
      const Kept& kept = kept_by[index];
      // As a later backward ends; the next one is yet to begin.
      const int64_t gone = over < 2    ? 0
                           : recompute ? kept.whole
                           : split     ? kept.for_weights
                                       : 0;
      layers.push_back(
          base[index] - gone +
          copies * layer_at(profile, boundary + i).trainable_bytes);
    }
    std::vector<int64_t> counts = in_flight(schedule, shape);
    for (int64_t& count : counts) {
      const bool all_in = count == shape.num_microbatches;
      count -= all_in ? over : split ? 0 : over - 1;
    }
    memory.points.push_back({SpanCost(layers), std::move(counts)});
  };
  if (further.sums > 0) {
    add_point(1, 1);
  }
  if (further.passing > 0) {
    add_point(further.sums > 0 ? 2 : 1, 2);
  }
  return memory;
}

KeptBytes kept_bytes(
    const Profile& profile,
    const Workload& workload,
    const Shape& shape,
    int64_t begin,
    int64_t end) {
  const int64_t samples = samples_per_microbatch(workload.global_batch, shape);
  const int64_t forward_only = num_forward_only(profile, workload.boundary);
  KeptBytes bytes;
  for (int64_t i = begin; i < end; ++i) {
    const Kept kept =
        kept_of(profile, workload.boundary, forward_only, i, samples);
    bytes.kept += kept.whole;
    bytes.for_weights += kept.for_weights;
    bytes.shared += kept.shared;
  }
  if (num_recomputed(workload.checkpoint, shape) > 0) {
    bytes.recomputed = bytes.kept;
    bytes.kept = end <= forward_only
                     ? 0
                     : input_bytes(profile, workload.boundary, begin, samples);
  }
  return bytes;
}

FurtherGradients further_gradients(
    const Profile& profile,
    const Workload& workload,
    const Shape& shape,
    int64_t begin,
    int64_t end) {
  FurtherGradients further;
  const bool plain = shape.num_stages == 1 && shape.num_microbatches == 1;
  const bool into_others =
      shape.num_replicas > 1 || workload.accumulation_steps > 1;
  for (int64_t i = begin; i < end && !plain; ++i) {
    const int64_t bytes =
        layer_at(profile, workload.boundary + i).trainable_bytes;
    further.sums += into_others ? bytes : 0;
    further.passing += shape.num_microbatches > 1 ? bytes : 0;
  }
  return further;
}

int64_t state_bytes(
    const Profile& profile,
    const Cluster& cluster,
    int64_t boundary,
    int64_t begin,
    int64_t end) {
  int64_t bytes = 0;
  for (int64_t i = begin; i < end; ++i) {
    bytes += state_of(layer_at(profile, boundary + i), cluster);
  }
  return bytes;
}

}  // namespace pipetransformer::planner
