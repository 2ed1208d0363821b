// The paper's own rules for cuts, K and M, kept as a baseline: greedy cuts by
// parameter count, K by halving, M from a table. Never the default.
//
// Pure functions over integer unit sizes, thread-safe. Source: PipeTransformer
// (ICML 2021), section 3.2 and its published settings. Comparisons are exact
// integers: some of the published pipeline lengths hang on an equality.
#pragma once

#include <cstdint>
#include <vector>

namespace pipetransformer::planner::paper {

// What frozen units weigh: 1/6 of their parameters, all on the first stage.
inline constexpr int64_t kFrozenDivisor = 6;

// Number of active units per stage, in order; a stage may be empty. A stage
// takes the next unit while its load stays below mean + variance of what was
// unassigned when it opened, in millions of parameters; the last stage takes
// the rest. The first stage opens with 1/6 of `frozen_sizes`, which its mean
// counts and its variance does not; none, as in the released code, charges
// nothing. Throws std::invalid_argument unless sizes are 0 .. 2^40, at most
// 2^20 of each kind, and num_stages is 1 .. 2^20.
std::vector<int64_t> greedy_partition(
    const std::vector<int64_t>& active_sizes,
    const std::vector<int64_t>& frozen_sizes,
    int64_t num_stages);

// Load of the largest stage of the greedy partition, rounded up, so that it is
// within a whole number exactly if the load is.
int64_t largest_load(
    const std::vector<int64_t>& active_sizes,
    const std::vector<int64_t>& frozen_sizes,
    int64_t num_stages);

// Halves `num_stages` while the greedy partition onto half as many stages stays
// within `largest_allowed`.
int64_t compress(
    const std::vector<int64_t>& active_sizes,
    const std::vector<int64_t>& frozen_sizes,
    int64_t num_stages,
    int64_t largest_allowed);

// M of the published runs: 16, and 4 when a single device is left.
int64_t num_microbatches(int64_t num_stages);

}  // namespace pipetransformer::planner::paper
