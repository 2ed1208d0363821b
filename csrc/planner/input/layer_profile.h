// What the planner knows: measured costs per layer, and the cluster.
//
// Plain values, torch-free, no thread affinity. Times are int64 nanoseconds,
// sizes int64 bytes: every decision compares integers, so equal inputs give
// equal plans on every rank. `check` refuses values whose sums could overflow;
// all other files of this room rely on it.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace pipetransformer::planner {

// One layer (element of the user's Sequential). Each list holds one entry per
// micro-batch size of the profile.
struct LayerProfile {
  std::vector<int64_t> forward_ns;
  std::vector<int64_t> input_grad_ns;
  std::vector<int64_t> weight_grad_ns;
  std::vector<int64_t> forward_only_ns;  // without gradients, as frozen
  int64_t parameter_bytes = 0;
  int64_t trainable_bytes = 0;  // of them: have gradients and optimizer state
  int64_t activation_bytes_per_sample = 0;  // held from forward to backward
  int64_t weight_grad_activation_bytes_per_sample = 0;  // and to W, where split
  int64_t activation_bytes_per_microbatch =
      0;                                // besides, to both, for any rows
  int64_t shared_activation_bytes = 0;  // once, for all micro-batches of a step
  int64_t boundary_bytes_per_sample = 0;  // needed by later layers
  bool trainable = true;     // false: the user froze it, or it has no parameter
  int64_t optimizer_ns = 0;  // its step over what trains; 0: not measured
  // Its state for what trains; nullopt: not measured.
  std::optional<int64_t> optimizer_bytes;
};

struct Profile {
  std::vector<int64_t> microbatch_samples;  // strictly increasing
  std::vector<LayerProfile> layers;
  std::vector<std::pair<int64_t, int64_t>> tied_layers;  // share a parameter
  // The second pops what the first stashes: cuts may separate them, their bytes
  // are in the boundaries between; the boundary of the frozen layers may not.
  std::vector<std::pair<int64_t, int64_t>> skips;

  int64_t num_layers() const {
    return static_cast<int64_t>(layers.size());
  }
};

// The activation cache of one node. A tier without bytes does not exist; a rate
// of 0 is not known, and reads from it cost nothing. The disk holds what host
// memory has no room for.
struct CacheTiers {
  int64_t host_bytes = 0;
  int64_t host_bytes_per_s = 0;
  int64_t disk_bytes = 0;
  int64_t disk_bytes_per_s = 0;
  // Of each record read from host memory, whatever its size; without a rate it
  // does not count.
  int64_t host_record_ns = 0;
  // Each replica reads its rows of host memory before its first forward, and
  // not alongside the step.
  bool host_in_line = false;
};

// Rates of nullopt mean that transfers cost nothing (CPU slots).
struct Cluster {
  int64_t num_nodes = 1;
  int64_t devices_per_node = 1;
  int64_t device_memory_bytes = 0;
  std::optional<int64_t> device_link_bytes_per_s;
  int64_t device_link_latency_ns = 0;
  std::optional<int64_t> network_bytes_per_s;
  int64_t network_latency_ns = 0;
  // Of what trains, whatever was measured; nullopt: what was measured, and as
  // much as Adam's where nothing was.
  std::optional<double> optimizer_bytes_per_parameter_byte;
  int64_t context_bytes = 0;
  // Devices of a node that run at full speed together, in thousandths, as slots
  // of a host that share cores; 0: all of them.
  int64_t cores_permille = 0;
  // Between processes of a node, each of which has a replica, where gradients
  // go from one to the next through the host: the rate, at which a process
  // works, and the time of each of the 2 (R - 1) rounds of a ring.
  std::optional<int64_t> replica_link_bytes_per_s;
  int64_t replica_link_latency_ns = 0;
  // What each replica's process does for a step and for each of its rows
  // besides computing: loading, the loss, bookkeeping.
  int64_t step_ns = 0;
  int64_t row_ns = 0;
  std::optional<CacheTiers> cache;  // nullopt: tiers without limits
};

// Throws std::invalid_argument when a list has a wrong length, a value is
// negative, or the sums over all layers at `global_batch` samples would not
// fit 62 bits.
void check(
    const Profile& profile,
    const Cluster& cluster,
    int64_t global_batch);

// The optimizer's state for what trains of the layer.
int64_t optimizer_bytes(const LayerProfile& layer, const Cluster& cluster);

// Whether a cut before layer `begin` + i separates no layers that share a
// parameter, for i of 0 .. end - begin.
std::vector<char>
allowed_cuts(const Profile& profile, int64_t begin, int64_t end);

}  // namespace pipetransformer::planner
