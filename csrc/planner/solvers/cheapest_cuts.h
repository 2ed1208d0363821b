// Exact least total of what each inner cut costs, under rules: what is left to
// decide once the largest stages are capped. Pure, int64, thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/solvers/partition.h"
#include "planner/solvers/reach.h"

namespace pipetransformer::planner {

struct CheapestCuts {
  int64_t total;
  Cuts cuts;  // lexicographically smallest with that total
};

// `cut_ns`: n + 1 entries, not negative, the ends are ignored. nullopt if no
// partition satisfies the rules. By a table over the begins that are left on
// each level, O(K w^2) for levels of width w.
std::optional<CheapestCuts> cheapest_cuts(
    const std::vector<int64_t>& cut_ns,
    const Rules& rules,
    int64_t num_stages);

// The same under the caps set in `reach`, which it tabulates.
std::optional<CheapestCuts>
cheapest_cuts(const std::vector<int64_t>& cut_ns, Reach& reach);

}  // namespace pipetransformer::planner
