// Backends of an active group whose collectives end when the run fails.
//
// A gloo collective whose peer died, or merely stopped, returns after its
// timeout, and no call wakes it before. GuardedBackend forwards each collective
// to a real backend and returns Work of ours: it completes with the real one,
// or with PeerFailureError as soon as a failure is latched.
// DistributedDataParallel waits for the Work's future, so backward() raises at
// once. An error of the real collective is itself latched as a failure: a peer
// is gone.
//
// SingleBackend is the group of one: collectives without sockets or threads.
//
// Thread-safe as far as the real backend is. Forwarded are the collectives that
// DistributedDataParallel and ActiveGroup use; others say that they are
// missing.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "autodp/failure/failure.h"

namespace pipetransformer::autodp {

// Completes with `inner`, or with the latched failure, whichever comes first.
// `operation` names the collective in the failure.

c10::intrusive_ptr<c10d::Work> guard_work(
    const c10::intrusive_ptr<c10d::Work>& inner,
    c10d::OpType type,
    std::string operation,
    const std::shared_ptr<FailureLatch>& latch);

class GuardedBackend : public c10d::Backend {
 public:
  // `timeout` bounds each collective, whatever the real backend was built with.
  GuardedBackend(
      c10::intrusive_ptr<c10d::Backend> inner,
      std::shared_ptr<FailureLatch> latch,
      std::chrono::milliseconds timeout);

  const std::string getBackendName() const override;
  void setTimeout(std::chrono::milliseconds timeout) override;

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work>
  barrier(const c10d::BarrierOptions& options) override;

  // Takes the real backend out; collectives throw from then on. Its destructor
  // may block until a stuck collective times out: drop it in the background.
  c10::intrusive_ptr<c10d::Backend> take_inner();

 private:
  using Start =
      std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& inner)>;
  c10::intrusive_ptr<c10d::Work>
  start(c10d::OpType type, const char* operation, const Start& start);
  template <typename AnyOptions>
  AnyOptions with_timeout(const AnyOptions& options) const;

  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<FailureLatch> latch_;
  std::chrono::milliseconds timeout_;
};

class SingleBackend : public c10d::Backend {
 public:
  explicit SingleBackend(std::shared_ptr<FailureLatch> latch);

  const std::string getBackendName() const override;
  void setTimeout(std::chrono::milliseconds timeout) override;

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work>
  barrier(const c10d::BarrierOptions& options) override;

 private:
  std::shared_ptr<FailureLatch> latch_;
};

}  // namespace pipetransformer::autodp
