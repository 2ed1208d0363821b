// Why a pipeline length is out. Pure, thread-safe.
#pragma once

#include <cstdint>
#include <optional>

#include "planner/input/layer_profile.h"
#include "planner/input/workload.h"
#include "planner/search/request.h"

namespace pipetransformer::planner {

enum class RefusalCause {
  kMemory,            // the worst stage of the best cuts misses bytes
  kFixedMemory,       // context and frozen layers alone exceed the device
  kSharedParameters,  // too few allowed cuts
  kBatch,             // micro-batches would get too few rows
};

struct Refusal {
  Shape shape;  // for the M that came closest
  RefusalCause cause = RefusalCause::kMemory;
  int64_t missing_bytes = 0;
  int64_t stage_begin = 0;  // layers of the stage that does not fit
  int64_t stage_end = 0;
  int64_t layer = 0;  // its largest layer
};

// The reason why no M, schedule, placement or tier makes `num_stages` fit;
// nullopt if one does.
std::optional<Refusal> refusal_of(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    int64_t num_stages);

}  // namespace pipetransformer::planner
