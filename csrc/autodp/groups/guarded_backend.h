// Backends of an active group whose collectives end when the run fails.
//
// A gloo collective whose peer died, or merely stopped, returns after its
// timeout, and no call wakes it before. GuardedBackend forwards each collective
// to a real backend and returns Work of ours: it completes with the real one,
// or with PeerFailureError as soon as a failure is latched.
// DistributedDataParallel waits for the Work's future, so backward() raises at
// once. An error of the real collective is itself latched as a failure: a peer
// is gone. NCCL raises such an error in the call as well.
//
// Note [Collectives that end on a device]
// NCCL's calls only queue work, and its futures are complete when the host goes
// on: streams wait, not threads. A peer that dies then leaves a kernel that
// spins for ever, and the host hangs where it next synchronises. So such a
// backend is aborted, all of it and once, when a failure is latched; its work
// is complete when the device has done it; and before it is dropped it is
// aborted as well, for its destructor leaves the communicators' memory behind.
// NCCL also gives collectives up by itself, when the way to a peer is gone:
// they end like others, and only their Work tells. So whoever uses a result
// waits for the device, and then calls check_ended().
//
// SingleBackend is the group of one: collectives without sockets or threads.
//
// Thread-safe as far as the real backend is. Forwarded are the collectives that
// DistributedDataParallel and ActiveGroup use; others say that they are
// missing.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autodp/failure/failure.h"

namespace pipetransformer::autodp {

enum class WorkEnds { kOnHost, kOnDevice };

// Completes with `inner`, or with the latched failure, whichever comes first.
// `operation` names the collective in the failure.
c10::intrusive_ptr<c10d::Work> guard_work(
    const c10::intrusive_ptr<c10d::Work>& inner,
    c10d::OpType type,
    std::string operation,
    const std::shared_ptr<FailureLatch>& latch,
    WorkEnds ends);

// Of a call that failed at once: it completes with the latched failure, which
// this error is suspected to become.
c10::intrusive_ptr<c10d::Work> lost_work(
    c10d::OpType type,
    std::string operation,
    const std::string& error,
    const std::shared_ptr<FailureLatch>& latch);

class GuardedBackend : public c10d::Backend {
 public:
  // `timeout` bounds each collective, whatever the real backend was built with.
  GuardedBackend(
      c10::intrusive_ptr<c10d::Backend> inner,
      std::shared_ptr<FailureLatch> latch,
      std::chrono::milliseconds timeout,
      WorkEnds ends = WorkEnds::kOnHost);

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

  // On a device: throws if the run has failed, or if a collective that has
  // ended since the last call did so with an error, once the run knows of that.
  void check_ended();

  // Takes the real backend out; collectives throw from then on. The task drops
  // it, which may block until a stuck collective times out: run it in the
  // background. On a device it first waits for what is under way, until the
  // timeout or a failure at most.
  std::function<void()> take_apart();

 private:
  // The real backend, which two may abort: a failure and the end.
  struct Inner {
    explicit Inner(c10::intrusive_ptr<c10d::Backend> made)
        : backend(std::move(made)) {}
    void abort() noexcept;

    c10::intrusive_ptr<c10d::Backend> backend;
    std::atomic<bool> aborted{false};
  };
  struct Started {
    c10::intrusive_ptr<c10d::Work> work;
    c10d::OpType type;
    std::string operation;
  };
  // Forgets what has ended; returns the first of it that did so with an error.
  std::optional<Started> take_failed();
  using Start =
      std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& inner)>;
  c10::intrusive_ptr<c10d::Work>
  start(c10d::OpType type, const char* operation, const Start& start);
  template <typename AnyOptions>
  AnyOptions with_timeout(const AnyOptions& options) const;

  mutable std::mutex mutex_;
  std::shared_ptr<Inner> inner_;  // null once taken apart
  std::shared_ptr<FailureLatch> latch_;
  std::chrono::milliseconds timeout_;
  const WorkEnds ends_;
  uint64_t subscription_ = 0;
  // On a device: what may not have ended.
  std::vector<Started> under_way_;
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
