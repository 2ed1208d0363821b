// What is to be run: the batch, how much of the model is frozen, and how a
// pipeline may run it. Plain values, thread-safe.
#pragma once

#include <cstdint>
#include <optional>

namespace pipetransformer::planner {

enum class Checkpoint { kNever, kExceptLast, kAlways };

// Copies between stages. Overlapped: on engines of their own, double-buffered,
// so a stage's pace is that of the slower of its compute and its copies.
// Serial: a copy keeps both devices busy.
enum class CopyModel { kOverlapped, kSerial };

// K, R and M of a plan.
struct Shape {
  int64_t num_stages = 1;
  int64_t num_replicas = 1;
  int64_t num_microbatches = 1;

  bool operator==(const Shape&) const = default;
};

// What stays fixed while plans are compared.
struct Workload {
  int64_t global_batch = 1;
  int64_t boundary = 0;  // frozen layers
  Checkpoint checkpoint = Checkpoint::kNever;
  CopyModel copies = CopyModel::kOverlapped;
  // Samples of the data set, which decides how many a cache tier can serve;
  // nullopt: as many as it holds.
  std::optional<int64_t> num_samples;
  // Batches that share an optimizer step.
  int64_t accumulation_steps = 1;
};

// The replica and micro-batch with the most rows decide the step.
inline int64_t samples_per_replica(int64_t global_batch, const Shape& shape) {
  return (global_batch + shape.num_replicas - 1) / shape.num_replicas;
}

inline int64_t
samples_per_microbatch(int64_t global_batch, const Shape& shape) {
  const int64_t share = samples_per_replica(global_batch, shape);
  return (share + shape.num_microbatches - 1) / shape.num_microbatches;
}

// Micro-batches that are computed again before their backward.
inline int64_t num_recomputed(Checkpoint checkpoint, const Shape& shape) {
  switch (checkpoint) {
    case Checkpoint::kNever:
      return 0;
    case Checkpoint::kExceptLast:
      return shape.num_microbatches - 1;
    case Checkpoint::kAlways:
      break;
  }
  return shape.num_microbatches;
}

}  // namespace pipetransformer::planner
