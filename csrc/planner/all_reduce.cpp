#include "planner/all_reduce.h"

#include <algorithm>

#include "planner/rates.h"

namespace pipetransformer::planner {

namespace {

using Wide = __int128;

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

int64_t replicas_per_node(const Cluster& cluster, const Shape& shape) {
  return std::max<int64_t>(1, cluster.devices_per_node / shape.num_stages);
}

}  // namespace

int64_t
all_reduce_ns(int64_t bytes, const Cluster& cluster, const Shape& shape) {
  if (bytes == 0) {
    return 0;
  }
  const int64_t in_node =
      std::min(replicas_per_node(cluster, shape), shape.num_replicas);
  return ring_ns(
             bytes,
             in_node,
             cluster.device_link_bytes_per_s,
             cluster.device_link_latency_ns) +
         network_all_reduce_ns(bytes, cluster, shape);
}

int64_t network_all_reduce_ns(
    int64_t bytes,
    const Cluster& cluster,
    const Shape& shape) {
  if (bytes == 0) {
    return 0;
  }
  const int64_t per_node = replicas_per_node(cluster, shape);
  const int64_t nodes = (shape.num_replicas + per_node - 1) / per_node;
  return ring_ns(
      bytes, nodes, cluster.network_bytes_per_s, cluster.network_latency_ns);
}

}  // namespace pipetransformer::planner
