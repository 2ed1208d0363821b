// The control plane: what all ranks of a run, active and standby, talk over. A
// store, a latch for the one failure of each generation, and the threads that
// look for it.
//
// Thread-safe. Methods that touch the store block for at most the slice they
// are given plus a few milliseconds, or until a failure is latched, and then
// throw PeerFailureError; call them without the GIL. close() is bounded too.
//
// A forked child must not use a plane, and must not destroy it as its parent
// would (its threads do not exist there): see ~ControlPlane.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "autodp/failure/failure.h"
#include "autodp/failure/run_state.h"
#include "autodp/failure/task_thread.h"
#include "autodp/failure/watcher.h"
#include "autodp/membership/rendezvous_board.h"
#include "autodp/store/store_client.h"

namespace pipetransformer::autodp {

class ControlPlane {
 public:
  // Two connections to the run's store, which holds its keys only (a prefix of
  // the shared one); nobody else uses them. Connected before every rank is
  // there: see Note [Slow starts] in watcher.cpp. `group_timeout_s`: how long a
  // group that connects waits for an address unless its backend says otherwise.
  ControlPlane(
      c10::intrusive_ptr<c10d::Store> store,
      c10::intrusive_ptr<c10d::Store> watched_store,
      const WatcherOptions& options,
      double group_timeout_s);
  ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  StoreClient& store() {
    return *parts_->client;
  }
  Watcher& watcher() {
    return parts_->watcher;
  }
  RunState& run() const {
    return *parts_->run;
  }
  // That of the generation this rank lives in.
  std::shared_ptr<FailureLatch> latch() const {
    return parts_->run->generation()->latch;
  }

  // Latches a failure of this generation; the store thread tells the others.
  void fail(Failure failure);

  // A store for building groups of this generation: see patient_store.h.
  c10::intrusive_ptr<c10d::Store> group_store() const;

  // This rank's part in the rendezvous after the failure of this generation.
  std::unique_ptr<RendezvousBoard> begin_rendezvous(std::string standing);

  // Goes on in the next generation. Old groups that are still being taken apart
  // do not delay those of the new one, which have a thread of their own: throws
  // as start_thread() does, and then nothing has changed.
  void advance(const std::vector<int>& members);

  // Runs `task` on the background thread that takes old groups apart; in a
  // closed plane on a thread of its own, which gets a second, see run_apart().
  // `task` and what it owns never die in the calling thread.
  void retire(std::function<void()>&& task);

  // False in a forked child, which must leave everything of the plane alone.
  bool owned_by_this_process() const noexcept;

  // Stops the threads that look for failures: after the last meeting a rank
  // that goes is not a dead one. A collective that then loses its peer still
  // latches a failure, at once.
  void stop_watching() noexcept;

  // Ends all threads; idempotent. A latched failure is written to the store
  // first. At most about five seconds, also with a dead store and stuck groups.
  void close() noexcept;

 private:
  struct Parts {
    Parts(
        c10::intrusive_ptr<c10d::Store> store,
        c10::intrusive_ptr<c10d::Store> watched_store,
        const WatcherOptions& options);
    std::shared_ptr<RunState> run;
    std::shared_ptr<StoreClient> client;
    Watcher watcher;
    std::mutex retire_mutex;
    std::unique_ptr<TaskThread> retire_thread;
  };

  std::unique_ptr<Parts> parts_;
  std::atomic<bool> closed_{false};
  const WatcherOptions options_;
  const double group_timeout_s_;
  const int owner_pid_;
};

}  // namespace pipetransformer::autodp
