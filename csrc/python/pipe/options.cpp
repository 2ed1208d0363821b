#include "python/pipe/options.h"

#include <algorithm>
#include <stdexcept>

namespace pipetransformer::bindings {

namespace {

[[noreturn]] void
refuse_word(const char* what, const char* expected, const std::string& word) {
  throw std::invalid_argument(
      std::string(what) + ": expected " + expected + ", got '" + word + "'");
}

}  // namespace

int32_t count_checkpointed(const CallOptions& options, std::size_t count) {
  const auto num_microbatches = static_cast<int32_t>(count);
  if (options.checkpoint == "always") {
    return num_microbatches;
  }
  if (options.checkpoint == "except_last") {
    return options.strict
               ? std::min(
                     num_microbatches,
                     static_cast<int32_t>(options.num_microbatches) - 1)
               : num_microbatches - 1;
  }
  if (options.checkpoint == "never") {
    return 0;
  }
  refuse_word(
      "checkpoint", "'always', 'except_last' or 'never'", options.checkpoint);
}

pipe::DrawMode draw_mode(const CallOptions& options) {
  const std::string& mode = options.draws.mode;
  if (mode == "keyed") {
    return pipe::DrawMode::kKeyed;
  }
  if (mode == "fallback") {
    return pipe::DrawMode::kFallback;
  }
  if (mode == "global") {
    return pipe::DrawMode::kGlobal;
  }
  refuse_word("draws", "'keyed', 'fallback' or 'global'", mode);
}

pipe::RowSplit row_split(const CallOptions& options) {
  return options.even ? pipe::RowSplit::kEven : pipe::RowSplit::kChunk;
}

pipe::Dispatch
dispatch_of(const CallOptions& options, pipe::Dispatch automatic) {
  if (options.dispatch == "auto") {
    return automatic;
  }
  if (options.dispatch == "serial") {
    return pipe::Dispatch::kSerial;
  }
  if (options.dispatch == "threads") {
    return pipe::Dispatch::kThreads;
  }
  refuse_word("dispatch", "'auto', 'serial' or 'threads'", options.dispatch);
}

}  // namespace pipetransformer::bindings
