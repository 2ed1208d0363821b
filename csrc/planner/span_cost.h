// Cost of a stage that holds the layers [begin, end): a prefix difference plus
// a charge for the boundary it opens with and one for the boundary it ends
// with. Times, bytes and memory of stages all have this form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pipetransformer::planner {

// Indices run over 0..n, n = number of layers. `prefix` does not decrease;
// `entry` and `exit` are not negative. Immutable values: thread-safe.
class SpanCost {
 public:
  SpanCost(
      const std::vector<int64_t>& layer_costs,
      std::vector<int64_t> entry,
      std::vector<int64_t> exit)
      : prefix_(layer_costs.size() + 1, 0),
        entry_(std::move(entry)),
        exit_(std::move(exit)) {
    for (std::size_t i = 0; i < layer_costs.size(); ++i) {
      prefix_[i + 1] = prefix_[i] + layer_costs[i];
    }
  }

  explicit SpanCost(const std::vector<int64_t>& layer_costs)
      : SpanCost(
            layer_costs,
            std::vector<int64_t>(layer_costs.size() + 1, 0),
            std::vector<int64_t>(layer_costs.size() + 1, 0)) {}

  int64_t num_layers() const {
    return static_cast<int64_t>(prefix_.size()) - 1;
  }
  // Cost of the layers alone, a lower bound of `stage`.
  int64_t layers(int64_t begin, int64_t end) const {
    return at(prefix_, end) - at(prefix_, begin);
  }
  int64_t stage(int64_t begin, int64_t end) const {
    return layers(begin, end) + at(entry_, begin) + at(exit_, end);
  }
  int64_t entry(int64_t boundary) const {
    return at(entry_, boundary);
  }

 private:
  static int64_t at(const std::vector<int64_t>& values, int64_t index) {
    return values[static_cast<std::size_t>(index)];
  }

  std::vector<int64_t> prefix_;
  std::vector<int64_t> entry_;
  std::vector<int64_t> exit_;
};

}  // namespace pipetransformer::planner
