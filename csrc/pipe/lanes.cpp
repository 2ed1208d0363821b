#include "pipe/lanes.h"

#include <stdexcept>
#include <string>

namespace pipetransformer::pipe {

Lanes Lanes::make(const std::vector<Lane>& lanes, int32_t num_stages) {
  Lanes result;
  result.popped.resize(num_stages);
  result.stashed.resize(num_stages);
  for (const auto& [source, destination] : lanes) {
    if (source < 0 || source >= destination || destination >= num_stages) {
      throw std::invalid_argument(
          "skip lane: expected to lead from a stage to a later one of " +
          std::to_string(num_stages) + ", got " + std::to_string(source) +
          " to " + std::to_string(destination));
    }
    result.sources.push_back(source);
    result.positions.push_back(
        static_cast<int32_t>(result.stashed[source].size()));
    result.stashed[source].push_back(result.count);
    result.popped[destination].push_back(result.count);
    ++result.count;
  }
  return result;
}

}  // namespace pipetransformer::pipe
