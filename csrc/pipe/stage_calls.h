// What the pipe needs from the outside world: calling a stage. Implemented by
// the bindings with the user's modules; a test may implement it with lambdas.
//
// Thread safety: call() is called on the stage's worker, for one stage by one
// thread at a time; poll() on a waiting caller's thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "pipe/phase.h"

namespace pipetransformer::pipe {

using Tensors = std::vector<at::Tensor>;

struct CellId {
  int32_t stage = 0;
  int32_t microbatch = 0;
};

class StageCalls {
 public:
  virtual ~StageCalls() = default;

  // Runs the stage on the tensors of one micro-batch: those of its input, then
  // one for each skip lane that ends here. Returns those of its output in a
  // fixed order, then one for each lane that starts here; undefined is None.
  // May throw.
  virtual Tensors call(CellId cell, Phase phase, const Tensors& inputs) = 0;

  // Brings to this worker, inside the caller's context, what the outside world
  // keeps for the thread that calls backward; what it returns, destroyed on
  // this worker, takes it away.
  virtual std::shared_ptr<void> enter_backward() noexcept = 0;

  // Gives the outside world a chance to interrupt a wait, by throwing.
  virtual void poll() = 0;

  // Whether a leaf that requires grad is held by more than its graph, so that
  // somebody may want its gradient. What a layer made for the length of a call
  // is not; where that cannot be told, it is.
  virtual bool is_held(const at::Tensor& leaf) noexcept = 0;

  // Called on a worker whose backward has thrown: torch's engine leaves the
  // failure pending in the thread as well, where the next call would find it.
  virtual void forget_failure() noexcept = 0;
};

}  // namespace pipetransformer::pipe
