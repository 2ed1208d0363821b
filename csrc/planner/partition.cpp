#include "planner/partition.h"

#include <algorithm>
#include <cstddef>

namespace pipetransformer::planner {

namespace {

bool within(const Rules& rules, int64_t begin, int64_t end) {
  return std::all_of(
      rules.limits.begin(), rules.limits.end(), [&](const Limit& limit) {
        return limit.cost.get().stage(begin, end) <= limit.cap;
      });
}

bool within_stage(
    const Rules& rules,
    std::size_t stage,
    int64_t begin,
    int64_t end) {
  return std::all_of(
      rules.stage_limits.begin(),
      rules.stage_limits.end(),
      [&](const StageLimit& limit) {
        return limit.cost.stage(static_cast<int64_t>(stage), begin, end) <=
               limit.cap;
      });
}

bool layers_within(const Rules& rules, int64_t begin, int64_t end) {
  return std::all_of(
      rules.limits.begin(), rules.limits.end(), [&](const Limit& limit) {
        return limit.cost.get().layers(begin, end) <= limit.cap;
      });
}

// For each begin the last end whose layers alone respect the limits; does not
// decrease, so two pointers find all of them.
std::vector<int64_t> last_ends(const Rules& rules, int64_t num_layers) {
  std::vector<int64_t> last(static_cast<std::size_t>(num_layers));
  int64_t end = 0;
  for (int64_t begin = 0; begin < num_layers; ++begin) {
    end = std::max(end, begin);
    while (end < num_layers && layers_within(rules, begin, end + 1)) {
      ++end;
    }
    last[static_cast<std::size_t>(begin)] = end;
  }
  return last;
}

constexpr int64_t kUnreachable = -1;

// next[i]: end of the first stage when layers i.. are cut into r stages.
struct Level {
  std::vector<int64_t> next;
  int64_t lowest;  // smallest i with next[i] != kUnreachable, n + 1 if none
};

}  // namespace

// Note [Windowed reachability]
// Level r says from which i the rest of the row can be cut into r stages, and
// how its first stage ends soonest. It follows from level r-1: the first end j
// in i+1 .. last_end(i) that is reachable and within the limits. Stage costs
// are not monotone in j (boundaries differ), so every j of the window may have
// to be tried; but the scan starts at the lowest reachable j, normally
// succeeds there, and stops for good once the windows end below it. Hence
// about O(K n) per call, O(K n window) at worst. The first j found is also the
// smallest: following `next` from 0 spells the lexicographically first cuts.
std::optional<Cuts> cuts_within(const Rules& rules, int64_t num_stages) {
  const auto n = static_cast<int64_t>(rules.cut_allowed.size()) - 1;
  if (num_stages < 1 || num_stages > n) {
    return std::nullopt;
  }
  const std::vector<int64_t> last = last_ends(rules, n);
  const auto unreachable =
      std::vector<int64_t>(static_cast<std::size_t>(n) + 1, kUnreachable);
  std::vector<Level> levels{{unreachable, n}};
  levels.front().next.back() = n;  // zero stages hold zero layers
  for (int64_t stages = 1; stages <= num_stages; ++stages) {
    const Level& rest = levels.back();
    Level level{unreachable, n + 1};
    for (int64_t begin = n - stages; begin >= 0; --begin) {
      const auto index = static_cast<std::size_t>(begin);
      if (last[index] < rest.lowest) {
        break;
      }
      if (begin > 0 && rules.cut_allowed[index] == 0) {
        continue;
      }
      for (int64_t end = std::max(begin + 1, rest.lowest); end <= last[index];
           ++end) {
        if (rest.next[static_cast<std::size_t>(end)] != kUnreachable &&
            within(rules, begin, end) &&
            within_stage(
                rules,
                static_cast<std::size_t>(num_stages - stages),
                begin,
                end)) {
          level.next[index] = end;
          level.lowest = begin;
          break;
        }
      }
    }
    levels.push_back(std::move(level));
  }
  if (levels.back().next.front() == kUnreachable) {
    return std::nullopt;
  }
  Cuts cuts{0};
  for (int64_t stages = num_stages; stages >= 1; --stages) {
    const Level& level = levels[static_cast<std::size_t>(stages)];
    cuts.push_back(level.next[static_cast<std::size_t>(cuts.back())]);
  }
  return cuts;
}

int64_t largest_stage(const SpanCost& cost, const Cuts& cuts) {
  int64_t largest = 0;
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    largest = std::max(largest, cost.stage(cuts[k], cuts[k + 1]));
  }
  return largest;
}

std::optional<MinMax>
min_max(const SpanCost& cost, const Rules& rules, int64_t num_stages) {
  const std::optional<Cuts> any = cuts_within(rules, num_stages);
  if (!any) {
    return std::nullopt;
  }
  const int64_t n = cost.num_layers();
  int64_t low = (cost.layers(0, n) + num_stages - 1) / num_stages;
  for (int64_t i = 0; i < n; ++i) {
    low = std::max(low, cost.layers(i, i + 1));
  }
  // Invariant: some cuts reach high, none get below low.
  int64_t high = largest_stage(cost, *any);
  Rules capped = rules;
  capped.limits.push_back({cost, high});
  int64_t& cap = capped.limits.back().cap;
  while (low < high) {
    cap = low + (high - low) / 2;
    if (const auto found = cuts_within(capped, num_stages)) {
      high = largest_stage(cost, *found);
    } else {
      low = cap + 1;
    }
  }
  cap = high;
  return MinMax{high, cuts_within(capped, num_stages).value()};
}

}  // namespace pipetransformer::planner
