// How the rows of a mini-batch are split into micro-batches. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

namespace pipetransformer::pipe {

enum class RowSplit : uint8_t {
  kChunk,  // as Tensor.chunk: 7 rows in 4 give 2, 2, 2, 1; 9 in 4 give 3, 3, 3
  kEven,  // at most one row apart: 7 in 4 give 2, 2, 2, 1; 9 in 4 give 3, 2, 2,
          // 2
};

// Rows of each micro-batch, in order; at most num_microbatches entries, none of
// them zero unless num_rows is zero: then one entry of zero.
// kEven makes fewer where there are not `min_rows` for each: only a mini-batch
// of fewer rows gives a smaller one.
// Throws std::invalid_argument for num_rows < 0 or the others < 1.
std::vector<int64_t> split_rows(
    int64_t num_rows,
    int64_t num_microbatches,
    RowSplit split,
    int64_t min_rows = 1);

}  // namespace pipetransformer::pipe
