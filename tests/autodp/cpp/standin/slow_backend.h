// A backend whose collectives end on a thread of its own, as gloo's do: with 1
// more in each tensor, with an error once a peer is gone, or not before it is
// taken apart. Or as NCCL's: futures are complete at once, works when that
// thread has come to them, or at an abort.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "torch_standin.h"

namespace standin {

class SlowWork : public c10d::Work {
 public:
  SlowWork(std::vector<at::Tensor> tensors, bool queued)
      : tensors_(std::move(tensors)),
        queued_(queued),
        future_(c10::make_intrusive<c10::ivalue::Future>(0)) {
    if (queued_) {
      future_->markCompleted(c10::IValue(tensors_));
    }
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  void end(const char* error) {
    if (queued_) {
      finish();
      return;
    }
    if (error != nullptr) {
      const auto thrown = std::make_exception_ptr(c10::Error(error));
      future_->setError(thrown);
      finish(thrown);
      return;
    }
    for (const auto& tensor : tensors_) {
      ++tensor.item();
    }
    future_->markCompleted(c10::IValue(tensors_));
    finish();
  }

 private:
  std::vector<at::Tensor> tensors_;
  const bool queued_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class SlowBackend : public c10d::Backend {
 public:
  enum class Peers { kHere, kGone, kStuck };

  SlowBackend(int rank, int size, bool queues = false)
      : c10d::Backend(rank, size),
        queues_(queues),
        thread_([this] { run(); }) {}
  ~SlowBackend() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void abort() override {
    turn(Peers::kHere);
    changed_.notify_all();
  }

  // From now on; `kStuck` lasts until an abort.
  void turn(Peers peers) {
    const std::lock_guard lock(mutex_);
    peers_ = peers;
  }

  const std::string getBackendName() const override {
    return "slow";
  }
  void setTimeout(c10d::Milliseconds) override {}
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions&) override {
    return start(tensors);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions&) override {
    return start(tensors);
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>&,
      const c10d::AllgatherOptions&) override {
    return start(outputs.at(0));
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor&,
      const c10d::AllgatherOptions&) override {
    return start({output});
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return start({});
  }

 private:
  c10::intrusive_ptr<c10d::Work> start(std::vector<at::Tensor> tensors) {
    auto work = c10::make_intrusive<SlowWork>(std::move(tensors), queues_);
    {
      const std::lock_guard lock(mutex_);
      works_.push_back(work);
    }
    changed_.notify_all();
    return work;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] {
        return closing_ || (!works_.empty() && peers_ != Peers::kStuck);
      });
      if (works_.empty()) {
        return;
      }
      const auto work = std::move(works_.front());
      works_.pop_front();
      const bool ends = peers_ == Peers::kHere && !closing_;
      lock.unlock();
      work->end(ends ? nullptr : "connection closed by peer");
      lock.lock();
    }
  }

  const bool queues_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<SlowWork>> works_;
  Peers peers_ = Peers::kHere;
  bool closing_ = false;
  std::thread thread_;  // last: uses the others
};

}  // namespace standin
