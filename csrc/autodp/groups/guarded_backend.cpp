#include "autodp/groups/guarded_backend.h"

#include <thread>
#include <utility>

#include "autodp/failure/task_thread.h"

namespace pipetransformer::autodp {

using c10d::OpType;
using Work = c10::intrusive_ptr<c10d::Work>;

namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an error of no known kind";
  }
}

}  // namespace

GuardedBackend::GuardedBackend(
    c10::intrusive_ptr<c10d::Backend> inner,
    std::shared_ptr<FailureLatch> latch,
    std::chrono::milliseconds timeout,
    WorkEnds ends)
    : c10d::Backend(inner->getRank(), inner->getSize()),
      inner_(std::make_shared<Inner>(std::move(inner))),
      latch_(std::move(latch)),
      timeout_(timeout),
      ends_(ends) {
  if (ends_ == WorkEnds::kOnDevice) {
    // Not on the thread that latched: an abort may take seconds.
    subscription_ = latch_->subscribe([inner = inner_](const Failure&) {
      run_apart(
          "pt-abort",
          [inner] { inner->abort(); },
          std::chrono::milliseconds(0));
    });
  }
}

void GuardedBackend::Inner::abort() noexcept {
  if (aborted.exchange(true)) {
    return;
  }
  try {
    backend->abort();
  } catch (const std::exception& error) {
    TORCH_WARN("active group: could not abort its backend: ", error.what());
  }
}

const std::string GuardedBackend::getBackendName() const {
  return "pipetransformer";
}

void GuardedBackend::setTimeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  timeout_ = timeout;
}

std::function<void()> GuardedBackend::take_apart() {
  const std::lock_guard lock(mutex_);
  latch_->unsubscribe(subscription_);
  if (ends_ == WorkEnds::kOnHost) {
    return [inner = std::move(inner_)]() mutable { inner.reset(); };
  }
  return [inner = std::move(inner_),
          latch = latch_,
          works = std::move(under_way_),
          deadline = std::chrono::steady_clock::now() + timeout_]() mutable {
    for (const Started& each : works) {
      while (!each.work->isCompleted() && !latch->failed() &&
             std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    works.clear();
    if (inner) {
      inner->abort();
    }
    inner.reset();
  };
}

std::optional<GuardedBackend::Started> GuardedBackend::take_failed() {
  const std::lock_guard lock(mutex_);
  std::optional<Started> failed;
  std::erase_if(under_way_, [&failed](const Started& each) {
    if (!each.work->isCompleted()) {
      return false;
    }
    if (!failed && each.work->exception()) {
      failed = each;
    }
    return true;
  });
  return failed;
}

void GuardedBackend::check_ended() {
  latch_->check();
  if (const auto failed = take_failed()) {
    const std::string error = text_of(failed->work->exception());
    lost_work(failed->type, failed->operation, error, latch_)->wait();
  }
}

Work GuardedBackend::start(
    OpType type,
    const char* operation,
    const Start& start) {
  latch_->check();
  if (const auto failed = take_failed()) {
    const std::string error = text_of(failed->work->exception());
    return lost_work(failed->type, failed->operation, error, latch_);
  }
  std::shared_ptr<Inner> inner;
  {
    const std::lock_guard lock(mutex_);
    inner = inner_;
  }
  TORCH_CHECK(
      inner,
      operation,
      ": expected a live active group, got one that was retired");
  Work work;
  try {
    work = start(*inner->backend);
  } catch (const c10::DistError& error) {
    return lost_work(type, operation, error.what_without_backtrace(), latch_);
  }
  if (ends_ == WorkEnds::kOnDevice) {
    const std::lock_guard lock(mutex_);
    under_way_.push_back({work, type, operation});
  }
  return guard_work(work, type, operation, latch_, ends_);
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
