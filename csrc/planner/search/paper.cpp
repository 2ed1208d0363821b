#include "planner/search/paper.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace pipetransformer::planner::paper {

namespace {

using Wide = __int128;

constexpr int64_t kMillion = 1'000'000;
constexpr int64_t kLargestUnit = int64_t{1} << 40;
constexpr int64_t kMostUnits = int64_t{1} << 20;  // and stages

void check_sizes(const std::vector<int64_t>& sizes, const char* what) {
  if (sizes.size() > static_cast<std::size_t>(kMostUnits)) {
    throw std::invalid_argument(
        std::string(what) + ": expected at most 1048576 units, got " +
        std::to_string(sizes.size()));
  }
  for (const int64_t size : sizes) {
    if (size < 0 || size > kLargestUnit) {
      throw std::invalid_argument(
          std::string(what) +
          ": expected parameter counts from 0 to 2^40, got " +
          std::to_string(size));
    }
  }
}

void check(
    const std::vector<int64_t>& active,
    const std::vector<int64_t>& frozen,
    int64_t num_stages) {
  if (num_stages < 1 || num_stages > kMostUnits) {
    throw std::invalid_argument(
        "num_stages: expected 1 to 1048576, got " + std::to_string(num_stages));
  }
  check_sizes(active, "unit_sizes");
  check_sizes(frozen, "frozen_sizes");
}

int64_t sum(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// Whether load < mean + variance, where both are shares of `stages_left` of the
// sum and the population variance of the units from `first` on, in millions:
// load/1e6 < (sum/1e6 + variance/1e12) / stages_left, multiplied out. Loads
// come in sixths, `frozen` parameters weigh one each. Dividing by the number of
// units keeps every product within 128 bits; the remainder decides only when
// the quotients agree.
class Criterion {
 public:
  Criterion(
      const std::vector<int64_t>& sizes,
      std::size_t first,
      int64_t frozen,
      int64_t stages_left)
      : units_(static_cast<int64_t>(sizes.size() - first)),
        stages_left_(stages_left),
        sum_(frozen) {
    Wide squares = 0;
    Wide active = 0;
    for (std::size_t i = first; i < sizes.size(); ++i) {
      active += sizes[i];
      squares += Wide{sizes[i]} * sizes[i];
    }
    sum_ += active * kFrozenDivisor;
    // variance * units^2, in sixths: at most 6 * 2^120
    spread_ = (squares * units_ - active * active) * kFrozenDivisor;
  }

  bool admits(Wide load) const {
    // load * stages_left * 1e6 - sum * 1e6 < spread / units^2
    const Wide excess = (load * stages_left_ - sum_) * kMillion;
    const Wide square = Wide{units_} * units_;
    return excess < spread_ / square ||
           (excess == spread_ / square && spread_ % square != 0);
  }

 private:
  int64_t units_;
  int64_t stages_left_;
  Wide sum_;
  Wide spread_ = 0;
};

}  // namespace

std::vector<int64_t> greedy_partition(
    const std::vector<int64_t>& active_sizes,
    const std::vector<int64_t>& frozen_sizes,
    int64_t num_stages) {
  check(active_sizes, frozen_sizes, num_stages);
  std::vector<int64_t> counts(static_cast<std::size_t>(num_stages), 0);
  std::size_t next = 0;
  int64_t frozen = sum(frozen_sizes);
  for (int64_t stage = 0; stage + 1 < num_stages && next < active_sizes.size();
       ++stage) {
    const Criterion criterion(active_sizes, next, frozen, num_stages - stage);
    Wide load = std::exchange(frozen, 0);  // all of it is on the first stage
    while (next < active_sizes.size()) {
      load += Wide{active_sizes[next]} * kFrozenDivisor;
      if (!criterion.admits(load)) {
        break;
      }
      ++next;
      ++counts[static_cast<std::size_t>(stage)];
    }
  }
  counts.back() += static_cast<int64_t>(active_sizes.size() - next);
  return counts;
}

int64_t largest_load(
    const std::vector<int64_t>& active_sizes,
    const std::vector<int64_t>& frozen_sizes,
    int64_t num_stages) {
  Wide largest = 0;
  auto unit = active_sizes.begin();
  const auto counts = greedy_partition(active_sizes, frozen_sizes, num_stages);
  Wide load = sum(frozen_sizes);
  for (const int64_t count : counts) {
    for (int64_t i = 0; i < count; ++i) {
      load += Wide{*unit++} * kFrozenDivisor;
    }
    largest = std::max(largest, load);
    load = 0;
  }
  return static_cast<int64_t>((largest + kFrozenDivisor - 1) / kFrozenDivisor);
}

int64_t compress(
    const std::vector<int64_t>& active_sizes,
    const std::vector<int64_t>& frozen_sizes,
    int64_t num_stages,
    int64_t largest_allowed) {
  while (num_stages >= 2 &&
         largest_load(active_sizes, frozen_sizes, num_stages / 2) <=
             largest_allowed) {
    num_stages /= 2;
  }
  return num_stages;
}

int64_t num_microbatches(int64_t num_stages) {
  return num_stages == 1 ? 4 : 16;
}

}  // namespace pipetransformer::planner::paper
