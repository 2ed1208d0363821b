// An active group: the replicas' process group, built by its members only.
//
// Owns the c10d::ProcessGroup that DistributedDataParallel gets and takes it
// apart in the background. Thread-safe; the group outlives its plane safely.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <memory>

#include "autodp/control_plane.h"
#include "autodp/groups/guarded_backend.h"

namespace pipetransformer::autodp {

class ActiveGroup {
 public:
  // Wraps the real backends of a group of two or more members: `inner` carries
  // what is on the host, `on_device` what is on devices of that type; null:
  // `inner` does, too.
  ActiveGroup(
      std::shared_ptr<ControlPlane> plane,
      const c10::intrusive_ptr<c10d::Store>& store,
      c10::intrusive_ptr<c10d::Backend> inner,
      c10::intrusive_ptr<c10d::Backend> on_device,
      c10::DeviceType device_type,
      std::chrono::milliseconds timeout);
  // The group of one.
  ActiveGroup(
      std::shared_ptr<ControlPlane> plane,
      const c10::intrusive_ptr<c10d::Store>& store,
      c10::DeviceType device_type);
  ~ActiveGroup();
  ActiveGroup(const ActiveGroup&) = delete;
  ActiveGroup& operator=(const ActiveGroup&) = delete;

  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const {
    return process_group_;
  }

  // Once the host has waited for a device: throws if a collective there has
  // ended with an error, or the run has failed.
  void check_ended();

  // Hands the real backends to the plane's background thread, which drops it;
  // of a group of an earlier generation to a thread of its own, for that may
  // wait for a stopped peer, and must not keep those of this generation
  // waiting. Where there is no such thread, backends and connections live as
  // long as the process. Never blocks; idempotent. Collectives throw
  // afterwards.
  void retire() noexcept;

 private:
  void make_process_group(
      const c10::intrusive_ptr<c10d::Store>& store,
      const c10::intrusive_ptr<c10d::Backend>& backend,
      const c10::intrusive_ptr<c10d::Backend>& on_device,
      c10::DeviceType device_type);

  std::shared_ptr<ControlPlane> plane_;
  std::shared_ptr<FailureLatch> latch_;  // of the group's generation
  std::atomic<bool> retired_{false};
  c10::intrusive_ptr<GuardedBackend> guarded_;    // null: group of one
  c10::intrusive_ptr<GuardedBackend> on_device_;  // null: `guarded_` does it
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

// Waits until `work` is done or `slice` is over; says which. Does not throw and
// does not consume an error: Work::wait() does both afterwards.
bool wait_done(c10d::Work& work, std::chrono::milliseconds slice);

}  // namespace pipetransformer::autodp
