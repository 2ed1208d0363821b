#include "simulator/devices.h"

namespace pipetransformer::simulator {

using Wide = __int128;

int64_t Devices::compute_ns(std::size_t stage, int64_t time_ns) const {
  if (permille.empty()) {
    return time_ns;
  }
  return static_cast<int64_t>((Wide{time_ns} * permille[stage] + 999) / 1000);
}

Devices add_devices(
    TaskGraph& graph,
    int32_t replica,
    std::size_t num_stages,
    const Permille& permille) {
  Devices devices;
  devices.replica = replica;
  devices.permille = permille;
  devices.cache = graph.add_resource(ResourceKind::kCache);
  for (std::size_t j = 0; j < num_stages; ++j) {
    devices.compute.push_back(graph.add_resource(ResourceKind::kCompute));
    devices.forward_engine.push_back(
        graph.add_resource(ResourceKind::kCopyEngine));
    devices.backward_engine.push_back(
        graph.add_resource(ResourceKind::kCopyEngine));
  }
  return devices;
}

}  // namespace pipetransformer::simulator
