#include "pipe/rows.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pipetransformer::pipe {

std::vector<int64_t> split_rows(
    int64_t num_rows,
    int64_t num_microbatches,
    RowSplit split,
    int64_t min_rows) {
  if (num_rows < 0 || num_microbatches < 1 || min_rows < 1) {
    throw std::invalid_argument(
        "rows: expected rows >= 0, micro-batches >= 1 and at least 1 row of "
        "each, got " +
        std::to_string(num_rows) + ", " + std::to_string(num_microbatches) +
        " and " + std::to_string(min_rows));
  }
  if (num_rows == 0) {
    return {0};
  }
  std::vector<int64_t> sizes;
  if (split == RowSplit::kChunk) {
    const int64_t size = (num_rows - 1) / num_microbatches + 1;
    for (int64_t start = 0; start < num_rows; start += size) {
      sizes.push_back(std::min(size, num_rows - start));
    }
    return sizes;
  }
  const int64_t filled = std::max<int64_t>(1, num_rows / min_rows);
  const int64_t count = std::min(filled, num_microbatches);
  for (int64_t i = 0; i < count; ++i) {
    sizes.push_back(num_rows / count + (i < num_rows % count ? 1 : 0));
  }
  return sizes;
}

}  // namespace pipetransformer::pipe
