// Cost of a stage that holds the layers [begin, end): a prefix difference and a
// charge for the boundary it opens with and one for the boundary it ends with.
// Times, bytes and memory of stages all have this form.
#pragma once

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
  int64_t stage(int64_t begin, int64_t end) const {
    if (charges_ == Charges::kAdded) {
      return at(right_, end) - at(left_, begin);
    }
    const int64_t charge = at(entry_, begin) > at(exit_, end)
                               ? at(entry_, begin)
                               : at(exit_, end);
    return layers(begin, end) > charge ? layers(begin, end) : charge;
  }
  int64_t entry(int64_t boundary) const {
    return at(entry_, boundary);
  }
  int64_t exit(int64_t boundary) const {
    return at(exit_, boundary);
  }
  Charges charges() const {
    return charges_;
  }
  // Whether a stage never costs less than one inside it: always when no charges
  // are added. What the charges of overlapped copies demand of single
  // boundaries is not counted.
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
  std::vector<int64_t> left_;   // prefix - entry
  std::vector<int64_t> right_;  // prefix + exit
  bool monotone_ = true;
};

}  // namespace pipetransformer::planner
