#include "pipe/dispatch.h"

#include <algorithm>
#include <numeric>

namespace pipetransformer::pipe {

void DispatchChoice::observe(const std::vector<int64_t>& shortest_ns) {
  const bool complete =
      !shortest_ns.empty() &&
      std::find(shortest_ns.begin(), shortest_ns.end(), 0) == shortest_ns.end();
  if (!blocking_ || !complete) {
    return;
  }
  if (!warm_) {
    warm_ = true;
    return;
  }
  const int64_t mean_ns =
      std::accumulate(shortest_ns.begin(), shortest_ns.end(), int64_t{0}) /
      static_cast<int64_t>(shortest_ns.size());
  if (mean_ns < kShortCellNs) {
    choice_ = Dispatch::kSerial;
  } else if (mean_ns > kLongCellNs) {
    choice_ = Dispatch::kThreads;
  }
}

}  // namespace pipetransformer::pipe
