#include "autodp/groups/guarded_backend.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <utility>

namespace pipetransformer::autodp {

namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

Work completed(std::vector<at::Tensor> tensors) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(std::move(tensors)));
  return c10d::Work::create_from_future(future);
}

}  // namespace

SingleBackend::SingleBackend(std::shared_ptr<FailureLatch> latch)
    : c10d::Backend(0, 1), latch_(std::move(latch)) {}

const std::string SingleBackend::getBackendName() const {
  return "pipetransformer";
}

void SingleBackend::setTimeout(std::chrono::milliseconds /*timeout*/) {}

Work SingleBackend::broadcast(
    std::vector<at::Tensor>& tensors,
    const c10d::BroadcastOptions& /*options*/) {
  latch_->check();
  return completed(tensors);
}

// Over one member sum, average, minimum and maximum are the identity.
Work SingleBackend::allreduce(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceOptions& /*options*/) {
  latch_->check();
  return completed(tensors);
}

Work SingleBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& /*options*/) {
  latch_->check();
  for (size_t i = 0; i < inputs.size(); ++i) {
    outputs.at(i).at(0).copy_(inputs[i]);
  }
  return completed(inputs);
}

Work SingleBackend::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& /*options*/) {
  latch_->check();
  output.copy_(input.view_as(output));
  return completed({output});
}

Work SingleBackend::barrier(const c10d::BarrierOptions& /*options*/) {
  latch_->check();
  return completed({});
}

}  // namespace pipetransformer::autodp
