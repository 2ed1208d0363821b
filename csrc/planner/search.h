// The search over K, R, M and cuts for the shortest predicted GPipe step at a
// constant global batch, within each device's memory.
//
// Pure and deterministic: no clock, no randomness, int64 decisions.
// Thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/cost.h"
#include "planner/layer_profile.h"
#include "planner/request.h"

namespace pipetransformer::planner {

struct Candidate {
  Shape shape;
  Cuts cuts;  // layer indices of the model, from the boundary to L
  int64_t step_ns = 0;
  std::vector<int64_t> bytes_per_stage;
};

enum class RefusalCause {
  kMemory,            // the worst stage of the best cuts misses bytes
  kFixedMemory,       // context and frozen layers alone exceed the device
  kSharedParameters,  // too few allowed cuts
  kBatch,             // micro-batches would get too few rows
};

// Why a pipeline length is out, for the M that came closest.
struct Refusal {
  Shape shape;
  RefusalCause cause = RefusalCause::kMemory;
  int64_t missing_bytes = 0;
  int64_t stage_begin = 0;  // layers of the stage that does not fit
  int64_t stage_end = 0;
  int64_t layer = 0;  // its largest layer
};

struct SearchResult {
  std::vector<Candidate>
      candidates;  // at most 8, best first; empty: infeasible
  Candidate chosen;
  bool kept_current = false;  // the best did not beat the current shape by 2 %
  std::vector<Refusal> refusals;  // one per infeasible K
};

// Throws std::invalid_argument (see check). An empty `candidates` means that
// nothing fits and `refusals` say why.
SearchResult
search(const Profile& profile, const Cluster& cluster, const Request& request);

}  // namespace pipetransformer::planner
