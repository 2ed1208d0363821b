// Cost of a stage that holds the layers [begin, end): a prefix difference and a
// charge for the boundary it opens with and one for the boundary it ends with.
// Times, bytes and memory of stages all have this form.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipetransformer::planner {

// How the charges of a stage's boundaries join the cost of its layers. Added: a
// copy occupies the device, cost = layers + entry + exit. Overlapped: copies
// have engines of their own, cost = max(layers, entry, exit).
enum class Charges { kAdded, kOverlapped };

// Indices run over 0..n, n = number of layers. Layer costs and charges are not
// negative and sum to less than 2^62. Immutable values: thread-safe.
class SpanCost {
 public:
  SpanCost(
      const std::vector<int64_t>& layer_costs,
      std::vector<int64_t> entry,
      std::vector<int64_t> exit,
      Charges charges = Charges::kAdded);

  explicit SpanCost(const std::vector<int64_t>& layer_costs);

  int64_t num_layers() const {
    return static_cast<int64_t>(prefix_.size()) - 1;
  }
  // Cost of the layers alone, a lower bound of `stage`.
  int64_t layers(int64_t begin, int64_t end) const {
    return at(prefix_, end) - at(prefix_, begin);
  }
  // Cost of the layers with what is added to it, but not with what overlaps.
  int64_t span(int64_t begin, int64_t end) const {
    return at(right_, end) - at(left_, begin);
  }
  int64_t stage(int64_t begin, int64_t end) const {
    return overlapped() ? std::max({span(begin, end), entry(begin), exit(end)})
                        : span(begin, end);
  }
  int64_t entry(int64_t boundary) const {
    return at(entry_, boundary);
  }
  int64_t exit(int64_t boundary) const {
    return at(exit_, boundary);
  }
  // Whether cost = max(layers, entry, exit); false when nothing is charged.
  bool overlapped() const {
    return charges_ == Charges::kOverlapped;
  }
  // Whether `span` never falls when a stage grows: always if nothing is added.
  bool monotone() const {
    return monotone_;
  }

 private:
  static int64_t at(const std::vector<int64_t>& values, int64_t index) {
    return values[static_cast<std::size_t>(index)];
  }

  Charges charges_;
  std::vector<int64_t> prefix_;
  std::vector<int64_t> entry_;
  std::vector<int64_t> exit_;
  std::vector<int64_t> left_;   // prefix, less entry if added
  std::vector<int64_t> right_;  // prefix, and exit if added
  bool monotone_ = true;
};

}  // namespace pipetransformer::planner
