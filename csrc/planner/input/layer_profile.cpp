#include "planner/input/layer_profile.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace pipetransformer::planner {

namespace {

// __int128 is a compiler extension; -Wpedantic is not ours to impose.
using Wide = __int128;

constexpr int64_t kLargestSum = int64_t{1} << 62;
// A step has at most (M + 1) terms of (m + 1) samples, each at most doubled by
// recomputation: 64 leaves room to spare. A transfer takes at most 2^40 ns (see
// transfer_ns) and a step has at most 4 M of them alongside 2 per boundary,
// with M below 2^19 (see kMostCells).
constexpr int64_t kHeadroom = 64;
constexpr double kAdam = 2.0;  // bytes of state per byte of a parameter
constexpr int64_t kLargestBatch = int64_t{1} << 22;
constexpr int64_t kLongestHost = int64_t{1} << 40;  // ns
constexpr int64_t kMostDevices = int64_t{1} << 30;  // nodes, and devices of one

void refuse_profile(const std::string& text) {
  throw std::invalid_argument(text);
}

std::string layer_field(std::size_t layer, const char* field) {
  return "profile layer " + std::to_string(layer) + " " + field;
}

void require_not_negative(int64_t value, const std::string& what) {
  if (value < 0) {
    refuse_profile(
        what + ": expected at least 0, got " + std::to_string(value));
  }
}

void require_positive(int64_t value, const std::string& what) {
  if (value < 1) {
    refuse_profile(
        what + ": expected at least 1, got " + std::to_string(value));
  }
}

void require_count(int64_t value, int64_t most, const std::string& what) {
  require_positive(value, what);
  if (value > most) {
    refuse_profile(
        what + ": expected at most " + std::to_string(most) + ", got " +
        std::to_string(value));
  }
}

Wide add_times(
    const std::vector<int64_t>& values,
    std::size_t num_points,
    const std::string& what) {
  if (values.size() != num_points) {
    refuse_profile(
        what + ": expected one entry per micro-batch size (" +
        std::to_string(num_points) + "), got " + std::to_string(values.size()));
  }
  Wide sum = 0;
  for (const int64_t value : values) {
    require_not_negative(value, what);
    sum += value;
  }
  return sum;
}

void check_points(const std::vector<int64_t>& points) {
  if (points.empty()) {
    refuse_profile(
        "profile microbatch_samples: expected at least one size, got none");
  }
  int64_t previous = 0;
  for (const int64_t point : points) {
    if (point <= previous) {
      refuse_profile(
          "profile microbatch_samples: expected increasing sizes from 1, got " +
          std::to_string(point) + " after " + std::to_string(previous));
    }
    previous = point;
  }
}

void check_trainable_bytes(const LayerProfile& layer, std::size_t index) {
  const int64_t most = layer.trainable ? layer.parameter_bytes : 0;
  if (layer.trainable_bytes < 0 || layer.trainable_bytes > most) {
    refuse_profile(
        layer_field(index, "trainable_bytes") + ": expected 0 to " +
        std::to_string(most) + ", got " +
        std::to_string(layer.trainable_bytes));
  }
}

void check_sums(Wide times, Wide bytes, int64_t global_batch) {
  const Wide limit = Wide{kLargestSum} / kHeadroom / global_batch;
  if (times > limit) {
    refuse_profile(
        "profile times: expected sums that fit 62 bits, got larger ones");
  }
  if (bytes > limit) {
    refuse_profile(
        "profile bytes: expected sums that fit 62 bits, got larger ones");
  }
}

void check_cluster(const Cluster& cluster) {
  require_count(cluster.num_nodes, kMostDevices, "cluster num_nodes");
  require_count(
      cluster.devices_per_node, kMostDevices, "cluster devices_per_node");
  require_positive(cluster.device_memory_bytes, "cluster device_memory_bytes");
  require_positive(
      cluster.device_link_bytes_per_s.value_or(1),
      "cluster device_link_bytes_per_s");
  require_positive(
      cluster.network_bytes_per_s.value_or(1), "cluster network_bytes_per_s");
  require_not_negative(
      cluster.device_link_latency_ns, "cluster device_link_latency_ns");
  require_not_negative(
      cluster.network_latency_ns, "cluster network_latency_ns");
  const int64_t cores = cluster.cores_permille;
  if (cores != 0 && (cores < 1000 || cores > kMostDevices)) {
    refuse_profile(
        "cluster cores_permille: expected 0 or 1000 to " +
        std::to_string(kMostDevices) + ", got " + std::to_string(cores));
  }
  require_positive(
      cluster.replica_link_bytes_per_s.value_or(1),
      "cluster replica_link_bytes_per_s");
  require_not_negative(cluster.step_ns, "cluster step_ns");
  require_not_negative(cluster.row_ns, "cluster row_ns");
  if (cluster.step_ns > kLongestHost || cluster.row_ns > kLongestHost) {
    refuse_profile("cluster step_ns and row_ns: expected at most 2^40 ns");
  }
  require_not_negative(
      cluster.replica_link_latency_ns, "cluster replica_link_latency_ns");
  require_not_negative(cluster.context_bytes, "cluster context_bytes");
  const CacheTiers tiers = cluster.cache.value_or(CacheTiers{});
  require_not_negative(tiers.host_bytes, "cluster cache host_bytes");
  require_not_negative(
      tiers.host_bytes_per_s, "cluster cache host_bytes_per_s");
  require_not_negative(tiers.host_record_ns, "cluster cache host_record_ns");
  require_not_negative(tiers.disk_bytes, "cluster cache disk_bytes");
  require_not_negative(
      tiers.disk_bytes_per_s, "cluster cache disk_bytes_per_s");
  const double factor =
      cluster.optimizer_bytes_per_parameter_byte.value_or(kAdam);
  if (!(factor >= 0.0 && factor <= kHeadroom)) {  // also refuses NaN
    refuse_profile(
        "cluster optimizer_bytes_per_parameter_byte: expected 0 to 64, got " +
        std::to_string(factor));
  }
}

void check_pairs(
    const std::vector<std::pair<int64_t, int64_t>>& pairs,
    int64_t num_layers,
    const std::string& field) {
  for (const auto& [first, second] : pairs) {
    if (first < 0 || second <= first || second >= num_layers) {
      refuse_profile(
          "profile " + field +
          ": expected pairs of increasing layer indices, got " +
          std::to_string(first) + " and " + std::to_string(second));
    }
  }
}

}  // namespace

void check(
    const Profile& profile,
    const Cluster& cluster,
    int64_t global_batch) {
  require_count(global_batch, kLargestBatch, "global_batch");
  check_cluster(cluster);
  check_points(profile.microbatch_samples);
  if (profile.layers.empty()) {
    refuse_profile("profile layers: expected at least one layer, got none");
  }
  const std::size_t num_points = profile.microbatch_samples.size();
  Wide times = 0;
  Wide bytes = 0;
  for (std::size_t i = 0; i < profile.layers.size(); ++i) {
    const LayerProfile& layer = profile.layers[i];
    const auto add = [&](const auto& values, const char* field) {
      times += add_times(values, num_points, layer_field(i, field));
    };
    add(layer.forward_ns, "forward_ns");
    add(layer.input_grad_ns, "input_grad_ns");
    add(layer.weight_grad_ns, "weight_grad_ns");
    add(layer.forward_only_ns, "forward_only_ns");
    require_not_negative(layer.optimizer_ns, layer_field(i, "optimizer_ns"));
    times += layer.optimizer_ns;
    const auto add_bytes = [&](int64_t value, const char* field) {
      require_not_negative(value, layer_field(i, field));
      bytes += value;
    };
    add_bytes(layer.parameter_bytes, "parameter_bytes");
    check_trainable_bytes(layer, i);
    add_bytes(layer.activation_bytes_per_sample, "activation_bytes_per_sample");
    add_bytes(
        layer.weight_grad_activation_bytes_per_sample,
        "weight_grad_activation_bytes_per_sample");
    add_bytes(
        layer.activation_bytes_per_microbatch,
        "activation_bytes_per_microbatch");
    add_bytes(layer.shared_activation_bytes, "shared_activation_bytes");
    add_bytes(layer.boundary_bytes_per_sample, "boundary_bytes_per_sample");
    add_bytes(layer.optimizer_bytes.value_or(0), "optimizer_bytes");
  }
  check_sums(times, bytes, global_batch);
  check_pairs(profile.tied_layers, profile.num_layers(), "tied_layers");
  check_pairs(profile.skips, profile.num_layers(), "skips");
}

int64_t optimizer_bytes(const LayerProfile& layer, const Cluster& cluster) {
  const std::optional<double>& told =
      cluster.optimizer_bytes_per_parameter_byte;
  if (!told && layer.optimizer_bytes) {
    return *layer.optimizer_bytes;
  }
  const auto trained = static_cast<double>(layer.trainable_bytes);
  return static_cast<int64_t>(std::ceil(trained * told.value_or(kAdam)));
}

std::vector<char>
allowed_cuts(const Profile& profile, int64_t begin, int64_t end) {
  std::vector<char> allowed(static_cast<std::size_t>(end - begin) + 1, 1);
  for (const auto& [first, second] : profile.tied_layers) {
    const int64_t last = std::min(second, end);
    for (int64_t cut = std::max(first + 1, begin); cut <= last; ++cut) {
      allowed[static_cast<std::size_t>(cut - begin)] = 0;
    }
  }
  return allowed;
}

}  // namespace pipetransformer::planner
