#include "pipe/cell_trace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>

namespace pipetransformer::pipe {

namespace {

struct Trace {
  std::atomic<bool> on{false};
  std::mutex mutex;
  std::vector<CellSpan> spans;
  std::size_t most = 0;
  std::size_t oldest = 0;  // once there are `most`
  int64_t left_out = 0;
};

Trace& trace() {
  // Never destroyed: workers may outlive static objects.
  static Trace* const only = new Trace;
  return *only;
}

int64_t now_ns() {
  return std::chrono::nanoseconds(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void trace_cells(int64_t most) {
  Trace& all = trace();
  const std::lock_guard lock(all.mutex);
  all.spans.clear();
  all.oldest = 0;
  all.left_out = 0;
  all.most = static_cast<std::size_t>(std::max<int64_t>(0, most));
  all.on.store(most > 0, std::memory_order_release);
}

std::pair<std::vector<CellSpan>, int64_t> take_cells() {
  Trace& all = trace();
  const std::lock_guard lock(all.mutex);
  std::rotate(
      all.spans.begin(),
      all.spans.begin() + static_cast<std::ptrdiff_t>(all.oldest),
      all.spans.end());
  all.oldest = 0;
  return {std::exchange(all.spans, {}), std::exchange(all.left_out, 0)};
}

CellTimer::CellTimer(char kind, int32_t stage, int32_t microbatch) noexcept
    : span_{kind, stage, microbatch, 0, 0},
      on_(trace().on.load(std::memory_order_acquire)) {
  if (on_) {
    span_.begin_ns = now_ns();
  }
}

CellTimer::~CellTimer() {
  if (!on_) {
    return;
  }
  span_.end_ns = now_ns();
  Trace& all = trace();
  const std::lock_guard lock(all.mutex);
  if (all.spans.size() < all.most) {
    all.spans.push_back(span_);
  } else if (all.most > 0) {
    all.spans[all.oldest] = span_;
    all.oldest = (all.oldest + 1) % all.most;
    ++all.left_out;
  }
}

}  // namespace pipetransformer::pipe
