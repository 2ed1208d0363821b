#include "autodp/groups/guarded_backend.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace pipetransformer::autodp {

namespace {

// The first sentence of a collective's error, without the source position that
// gloo puts before it in brackets and the advice that it puts behind.
std::string shorten(std::string text) {
  const auto begin = text.find("] ");
  if (text.starts_with('[') && begin != std::string::npos) {
    text.erase(0, begin + 2);
  }
  text.erase(std::min({text.find('\n'), text.find(". "), text.size()}));
  return text;
}

// What a call that did not start anything gives: it never completes.
class LostWork : public c10d::Work {
 public:
  explicit LostWork(c10d::OpType type)
      : c10d::Work(-1, type),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}
  bool isCompleted() override {
    return false;
  }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Latched by the watcher unless the peer's own account comes first, or at once
// where no watcher runs any more; that fails the work too.
void suspect(
    FailureLatch& latch,
    const std::string& operation,
    const std::string& error) {
  Failure failure;
  failure.phase = operation;
  const auto text = shorten(error);
  const bool late = text.find("Timed out") != std::string::npos;
  failure.reason = (late ? "a peer is gone or has been busy with something "
                           "else for longer than group_timeout: "
                         : "a peer is gone: ") +
                   text;
  latch.suspect(std::move(failure), steady_now_s());
}

// Two may complete the work, the real collective's thread and the thread that
// latches a failure; the first one does. Until then the latch and the real
// future each hold a reference, so a Work that nobody keeps stays alive.
class GuardedWork : public c10d::Work {
 public:
  GuardedWork(
      c10::intrusive_ptr<c10d::Work> inner,
      c10d::OpType type,
      std::string operation,
      std::shared_ptr<FailureLatch> latch,
      WorkEnds ends)
      : c10d::Work(-1, type),
        inner_(std::move(inner)),
        inner_future_(inner_->getFuture()),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            inner_future_->devices())),
        operation_(std::move(operation)),
        latch_(std::move(latch)),
        ends_(ends) {}

  // `self` is this: subscribes it to both of its ends.
  void listen(const c10::intrusive_ptr<GuardedWork>& self) {
    subscription_ = latch_->subscribe(
        [self](const Failure& failure) { self->fail(failure); });
    inner_future_->addCallback(
        [self](c10::ivalue::Future& inner) { self->on_inner(inner); });
  }

  // On a device the base class knows of the call only.
  bool isCompleted() override {
    return c10d::Work::isCompleted() &&
           (ends_ == WorkEnds::kOnHost || latch_->failed() ||
            inner_->isCompleted());
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = c10d::Work::wait(timeout);
    if (ends_ == WorkEnds::kOnDevice) {
      latch_->check();
    }
    return done;
  }

  void synchronize() override {
    inner_->synchronize();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

  std::vector<at::Tensor> result() override {
    return inner_->result();
  }

 private:
  void on_inner(c10::ivalue::Future& inner) {
    if (inner.hasError()) {
      suspect(*latch_, operation_, inner.tryRetrieveErrorMessage());
      return;
    }
    latch_->unsubscribe(subscription_);
    if (!claimed_.exchange(true)) {
      future_->markCompleted(inner.value(), inner.storages());
      finish();
    }
  }

  void fail(const Failure& failure) {
    if (!claimed_.exchange(true)) {
      const auto error = std::make_exception_ptr(PeerFailureError(failure));
      future_->setError(error);
      finish(error);
    }
  }

  const c10::intrusive_ptr<c10d::Work> inner_;
  const c10::intrusive_ptr<c10::ivalue::Future> inner_future_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  const std::string operation_;
  const std::shared_ptr<FailureLatch> latch_;
  const WorkEnds ends_;
  uint64_t subscription_ = 0;
  std::atomic<bool> claimed_{false};
};

}  // namespace

c10::intrusive_ptr<c10d::Work> guard_work(
    const c10::intrusive_ptr<c10d::Work>& inner,
    c10d::OpType type,
    std::string operation,
    const std::shared_ptr<FailureLatch>& latch,
    WorkEnds ends) {
  auto work = c10::make_intrusive<GuardedWork>(
      inner, type, std::move(operation), latch, ends);
  work->listen(work);
  return work;
}

c10::intrusive_ptr<c10d::Work> lost_work(
    c10d::OpType type,
    std::string operation,
    const std::string& error,
    const std::shared_ptr<FailureLatch>& latch) {
  auto work = guard_work(
      c10::make_intrusive<LostWork>(type),
      type,
      operation,
      latch,
      WorkEnds::kOnHost);
  suspect(*latch, operation, error);
  return work;
}

}  // namespace pipetransformer::autodp
