#include "planner/paper.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace pipetransformer::planner::paper {

namespace {

using Wide = __int128;

constexpr int64_t kMillion = 1'000'000;
constexpr int64_t kLargestUnit = int64_t{1} << 40;
constexpr int64_t kMostUnits = int64_t{1} << 20;  // and stages

void check_sizes(const std::vector<int64_t>& sizes, int64_t num_stages) {
  if (num_stages < 1 || num_stages > kMostUnits) {
    throw std::invalid_argument(
        "num_stages: expected 1 to 1048576, got " + std::to_string(num_stages));
  }
  if (sizes.size() > static_cast<std::size_t>(kMostUnits)) {
    throw std::invalid_argument(
        "unit_sizes: expected at most 1048576 units, got " +
        std::to_string(sizes.size()));
  }
  for (const int64_t size : sizes) {
    if (size < 0 || size > kLargestUnit) {
      throw std::invalid_argument(
          "unit_sizes: expected parameter counts from 0 to 2^40, got " +
          std::to_string(size));
    }
  }
}

// Whether load < mean + variance, where both are shares of `stages_left` of the
// sum and the population variance of the units from `first` on, in millions:
// load/1e6 < (sum/1e6 + variance/1e12) / stages_left, multiplied out. Dividing
// by the number of units keeps every product within 128 bits; the remainder
// decides only when the quotients agree.
class Criterion {
 public:
  Criterion(
      const std::vector<int64_t>& sizes,
      std::size_t first,
      int64_t stages_left)
      : units_(static_cast<int64_t>(sizes.size() - first)),
        stages_left_(stages_left) {
    Wide squares = 0;
    for (std::size_t i = first; i < sizes.size(); ++i) {
      sum_ += sizes[i];
      squares += Wide{sizes[i]} * sizes[i];
    }
    spread_ = squares * units_ - Wide{sum_} * sum_;  // variance * units^2
  }

  bool admits(int64_t load) const {
    // load * stages_left * 1e6 - sum * 1e6 < spread / units^2
    const Wide excess = (Wide{load} * stages_left_ - sum_) * kMillion;
    const Wide square = Wide{units_} * units_;
    return excess < spread_ / square ||
           (excess == spread_ / square && spread_ % square != 0);
  }

 private:
  int64_t units_;
  int64_t stages_left_;
  int64_t sum_ = 0;
  Wide spread_ = 0;
};

}  // namespace

std::vector<int64_t>
greedy_partition(const std::vector<int64_t>& unit_sizes, int64_t num_stages) {
  check_sizes(unit_sizes, num_stages);
  std::vector<int64_t> counts(static_cast<std::size_t>(num_stages), 0);
  std::size_t next = 0;
  for (int64_t stage = 0; stage + 1 < num_stages && next < unit_sizes.size();
       ++stage) {
    const Criterion criterion(unit_sizes, next, num_stages - stage);
    int64_t load = 0;
    while (next < unit_sizes.size() &&
           criterion.admits(load + unit_sizes[next])) {
      load += unit_sizes[next];
      ++next;
      ++counts[static_cast<std::size_t>(stage)];
    }
  }
  counts.back() += static_cast<int64_t>(unit_sizes.size() - next);
  return counts;
}

int64_t
largest_load(const std::vector<int64_t>& unit_sizes, int64_t num_stages) {
  int64_t largest = 0;
  auto unit = unit_sizes.begin();
  for (const int64_t count : greedy_partition(unit_sizes, num_stages)) {
    int64_t load = 0;
    for (int64_t i = 0; i < count; ++i) {
      load += *unit++;
    }
    largest = std::max(largest, load);
  }
  return largest;
}

int64_t compress(
    const std::vector<int64_t>& active_unit_sizes,
    int64_t num_stages,
    int64_t largest_allowed) {
  while (num_stages >= 2 &&
         largest_load(active_unit_sizes, num_stages / 2) <= largest_allowed) {
    num_stages /= 2;
  }
  return num_stages;
}

int64_t num_microbatches(int64_t num_stages) {
  return num_stages == 1 ? 4 : 16;
}

}  // namespace pipetransformer::planner::paper
