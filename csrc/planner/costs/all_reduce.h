// Time of an all-reduce of gradients over the replicas: rings within the nodes,
// then between them. Pure, int64, thread-safe.
#pragma once

#include <cstdint>

#include "planner/input/layer_profile.h"
#include "planner/input/workload.h"

namespace pipetransformer::planner {

// DDP reduces the last bucket only after the backward has ended.
inline constexpr int64_t kBucketBytes = int64_t{25} << 20;

// On the fullest node.
int64_t replicas_per_node(const Cluster& cluster, const Shape& shape);

// 0 for no bytes or a single replica.
int64_t
all_reduce_ns(int64_t bytes, const Cluster& cluster, const Shape& shape);

// The part of it between the nodes.
int64_t network_all_reduce_ns(
    int64_t bytes,
    const Cluster& cluster,
    const Shape& shape);

}  // namespace pipetransformer::planner
