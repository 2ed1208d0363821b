#include "planner/costs/all_reduce.h"

#include <algorithm>

#include "planner/costs/rates.h"

namespace pipetransformer::planner {

namespace {

using Wide = __int128;

// A ring moves 2 (n-1)/n of the bytes over each link, in 2 (n-1) messages that
// follow each other.
int64_t ring_ns(
    int64_t bytes,
    int64_t num_members,
    const std::optional<int64_t>& bytes_per_s,
    int64_t latency_ns) {
  if (num_members < 2) {
    return 0;
  }
  const Wide messages = Wide{2} * (num_members - 1);
  const auto moved = static_cast<int64_t>(messages * bytes / num_members);
  const Wide waits = std::min<Wide>(messages * latency_ns, kLongestTransferNs);
  return transfer_ns(moved, bytes_per_s, static_cast<int64_t>(waits));
}

// Processes move and add up the bytes themselves, on the cores that they share;
// each round waits for the slowest of them.
int64_t
processes_ns(int64_t bytes, int64_t num_members, const Cluster& cluster) {
  if (num_members < 2) {
    return 0;
  }
  const int64_t rounds = 2 * (num_members - 1);
  const auto moved = static_cast<int64_t>(Wide{rounds} * bytes / num_members);
  const int64_t alone_ns =
      transfer_ns(moved, cluster.replica_link_bytes_per_s, 0);
  const int64_t shared_ns =
      on_cores_ns(alone_ns, cluster.cores_permille, num_members);
  const Wide waits = Wide{rounds} * cluster.replica_link_latency_ns;
  return static_cast<int64_t>(std::min<Wide>(
      std::max(alone_ns, shared_ns) + waits, kLongestTransferNs));
}

// Replicas are dealt to the nodes in turn, so that each has one as soon as it
// can: what the runtime does with fewer replicas than would fit.
int64_t nodes_of(const Cluster& cluster, const Shape& shape) {
  return std::min(cluster.num_nodes, shape.num_replicas);
}

}  // namespace

int64_t replicas_per_node(const Cluster& cluster, const Shape& shape) {
  const int64_t nodes = nodes_of(cluster, shape);
  return (shape.num_replicas + nodes - 1) / nodes;
}

int64_t
all_reduce_ns(int64_t bytes, const Cluster& cluster, const Shape& shape) {
  if (bytes == 0) {
    return 0;
  }
  const int64_t in_node = replicas_per_node(cluster, shape);
  const int64_t in_node_ns = cluster.replica_link_bytes_per_s
                                 ? processes_ns(bytes, in_node, cluster)
                                 : ring_ns(
                                       bytes,
                                       in_node,
                                       cluster.device_link_bytes_per_s,
                                       cluster.device_link_latency_ns);
  return in_node_ns + network_all_reduce_ns(bytes, cluster, shape);
}

int64_t network_all_reduce_ns(
    int64_t bytes,
    const Cluster& cluster,
    const Shape& shape) {
  if (bytes == 0) {
    return 0;
  }
  return ring_ns(
      bytes,
      nodes_of(cluster, shape),
      cluster.network_bytes_per_s,
      cluster.network_latency_ns);
}

}  // namespace pipetransformer::planner
