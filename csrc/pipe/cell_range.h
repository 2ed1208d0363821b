// The profiler range of a cell: "chunk{i}-part{j}" and a suffix. Costs a check
// of a flag when nobody profiles. Enter it inside the caller's context, which
// holds the caller's profiler.
#pragma once

#include <ATen/record_function.h>

#include <string>

#include "pipe/stage_calls.h"

namespace pipetransformer::pipe {

class CellRange {
 public:
  // Somebody profiles this thread.
  static bool wanted() {
    return at::hasCallbacks();
  }

  CellRange(CellId id, const char* suffix)
      : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) {
      record_.before(
          "chunk" + std::to_string(id.microbatch) + "-part" +
          std::to_string(id.stage) + suffix);
    }
  }

 private:
  at::RecordFunction record_;
};

}  // namespace pipetransformer::pipe
