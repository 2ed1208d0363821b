// How a call of a pipeline is run, as Python says it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "pipe/dispatch.h"
#include "pipe/pipe_call.h"
#include "pipe/rows.h"

namespace pipetransformer::bindings {

// Keys of the random draws of one call.
struct DrawSettings {
  std::string mode = "keyed";    // "keyed", "fallback" or "global"
  std::optional<uint64_t> seed;  // without one: of the caller's generator
  int64_t step = 0;
  int64_t first_microbatch = 0;
};

// How a call is run.
struct CallOptions {
  int64_t num_microbatches = 1;
  bool even = false;     // sizes at most one row apart, else as Tensor.chunk
  int64_t min_rows = 1;  // of a micro-batch, if the mini-batch has as many
  std::string checkpoint = "never";
  std::string dispatch = "auto";
  // As the removed torch Pipe: only tensors at top level count, and
  // "except_last" goes by the number of micro-batches asked for.
  bool strict = false;
  bool spread = true;      // see StageOptions
  bool order_rule = true;  // see LinkRules::at_most_one_ahead
  bool early_recompute = true;
  bool copy_streams = true;  // see PipelineStreams::use_copy_streams
  bool record = true;        // gradients are recorded
  DrawSettings draws;
};

// What the words mean; each throws std::invalid_argument for an unknown one.
// `count`: micro-batches that exist. `automatic`: what "auto" means now.
int32_t count_checkpointed(const CallOptions& options, std::size_t count);
pipe::DrawMode draw_mode(const CallOptions& options);
pipe::Dispatch
dispatch_of(const CallOptions& options, pipe::Dispatch automatic);
pipe::RowSplit row_split(const CallOptions& options);

}  // namespace pipetransformer::bindings
