// Which shapes (K, R, M) a search tries. Pure, thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/input/layer_profile.h"
#include "planner/search/request.h"

namespace pipetransformer::planner {

// R to try at K stages, falling: pipelines stay within a node, so at most
// floor(devices / K) per node, and halves of that down to min_replicas, which
// leave devices idle: where the work is small, all-reduce and small
// micro-batches cost more than they save. With all_replicas the most alone, of
// those for which a batch has rows.
std::vector<int64_t> replica_counts(
    const Request& request,
    const Cluster& cluster,
    int64_t num_stages);

// Pipeline lengths to try, increasing.
std::vector<int64_t> stage_counts(
    const Request& request,
    const Profile& profile,
    const Cluster& cluster);

// At most 8 micro-batch counts: K, 2K .. 6K and divisors of the replica's batch
// between them, nearest to 3K first. Increasing; not yet checked against the
// batch. Of a batch with too few rows for K, the most that it can be cut into.
// With finer_microbatches 12K, 24K .. and the most that it can be cut into, if
// that is more than 6K.
std::vector<int64_t> microbatch_counts(
    const Request& request,
    int64_t num_stages,
    int64_t num_replicas);

// Whether every micro-batch of every replica gets its least number of rows, and
// the plan has at most kMostCells cells.
bool fills_microbatches(const Request& request, const Shape& shape);

}  // namespace pipetransformer::planner
