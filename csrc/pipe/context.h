// The caller's context on a worker: grad mode, autocast, inference mode,
// saved-tensor hooks, and the current stream of every device of the pipeline.
//
// A captured context is immutable and may be entered by several threads.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <vector>

namespace pipetransformer::pipe {

class CallerContext {
 public:
  // `devices` may repeat; CPU entries have no stream.
  explicit CallerContext(const std::vector<c10::Device>& devices);

  // The current thread's context with the streams of another one: autograd runs
  // a backward on the streams of its forward.
  static CallerContext with_streams_of(const CallerContext& other);

  // The current thread's context as a backward has it when it runs inside the
  // call of its forward: without autocast and grad mode, on the streams of the
  // forward.
  static CallerContext for_backward_of(const CallerContext& forward);

 private:
  friend class CallerScope;
  friend class CellScope;
  at::ThreadLocalState state_;
  c10::AutogradState autograd_;
  std::vector<c10::Stream> streams_;
};

// Enters the caller's context for as long as a thread works for one call. May
// hold Python objects; needs no GIL.
class CallerScope {
 public:
  explicit CallerScope(const CallerContext& context);
  CallerScope(const CallerScope&) = delete;
  CallerScope& operator=(const CallerScope&) = delete;

 private:
  at::ThreadLocalStateGuard state_;
  c10::MultiStreamGuard streams_;
};

// Note [Casts of a cell]
// torch.autocast keeps its casts of weights in one table of the process, until
// some thread leaves its outermost region. Two uses of a weight that share a
// cast have their gradients summed in the low precision, two that do not in the
// weight's own. Which of them share would be a matter of time: of how many
// cells one call of autograd takes, and of what other threads leave meanwhile.
// A cast from before a weight was changed, or from where no gradients are
// recorded, would serve as well. So cells keep out of that table: each use of a
// weight has a cast of its own, as under autocast(cache_enabled=False), and
// what is summed is summed in the weight's precision. WeightCasts shares the
// data of these casts, which no result can tell except for what its header
// names.

// What differs between cells inside a CallerScope of the same context: device
// and stream. Also keeps autocast's table of casts out of the cell, and undoes
// what a layer has done to the grad mode and to autocast.
class CellScope {
 public:
  // `own_stream`: of `device`, current instead of the caller's.
  CellScope(
      const CallerContext& context,
      c10::Device device,
      const std::optional<c10::Stream>& own_stream);
  ~CellScope();
  CellScope(const CellScope&) = delete;
  CellScope& operator=(const CellScope&) = delete;

 private:
  c10::OptionalStreamGuard own_stream_;
  c10::OptionalDeviceGuard device_;
  bool previous_cache_;
  c10::impl::LocalDispatchKeySet previous_keys_;
};

}  // namespace pipetransformer::pipe
