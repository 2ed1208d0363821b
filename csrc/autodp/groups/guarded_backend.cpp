#include "autodp/groups/guarded_backend.h"

#include <utility>

namespace pipetransformer::autodp {

using c10d::OpType;
using Work = c10::intrusive_ptr<c10d::Work>;

GuardedBackend::GuardedBackend(
    c10::intrusive_ptr<c10d::Backend> inner,
    std::shared_ptr<FailureLatch> latch,
    std::chrono::milliseconds timeout)
    : c10d::Backend(inner->getRank(), inner->getSize()),
      inner_(std::move(inner)),
      latch_(std::move(latch)),
      timeout_(timeout) {}

const std::string GuardedBackend::getBackendName() const {
  return "pipetransformer";
}

void GuardedBackend::setTimeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

c10::intrusive_ptr<c10d::Backend> GuardedBackend::take_inner() {
  const std::lock_guard lock(mutex_);
  return std::move(inner_);
}

Work GuardedBackend::start(
    OpType type,
    const char* operation,
    const Start& start) {
  latch_->check();
  c10::intrusive_ptr<c10d::Backend> inner;
  {
    const std::lock_guard lock(mutex_);
    inner = inner_;
  }
  TORCH_CHECK(
      inner,
      operation,
      ": expected a live active group, got one that was retired");
  return guard_work(start(*inner), type, operation, latch_);
}

template <typename AnyOptions>
AnyOptions GuardedBackend::with_timeout(const AnyOptions& options) const {
  auto changed = options;
  if (changed.timeout == c10d::kUnsetTimeout) {
    const std::lock_guard lock(mutex_);
    changed.timeout = timeout_;
  }
  return changed;
}

Work GuardedBackend::broadcast(
    std::vector<at::Tensor>& tensors,
    const c10d::BroadcastOptions& options) {
  return start(OpType::BROADCAST, "broadcast", [&](c10d::Backend& inner) {
    return inner.broadcast(tensors, with_timeout(options));
  });
}

Work GuardedBackend::allreduce(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceOptions& options) {
  return start(OpType::ALLREDUCE, "all_reduce", [&](c10d::Backend& inner) {
    return inner.allreduce(tensors, with_timeout(options));
  });
}

Work GuardedBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  return start(OpType::ALLGATHER, "all_gather", [&](c10d::Backend& inner) {
    return inner.allgather(outputs, inputs, with_timeout(options));
  });
}

Work GuardedBackend::_allgather_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  return start(
      OpType::_ALLGATHER_BASE, "all_gather", [&](c10d::Backend& inner) {
        return inner._allgather_base(output, input, with_timeout(options));
      });
}

Work GuardedBackend::barrier(const c10d::BarrierOptions& options) {
  return start(OpType::BARRIER, "barrier", [&](c10d::Backend& inner) {
    return inner.barrier(with_timeout(options));
  });
}

}  // namespace pipetransformer::autodp
