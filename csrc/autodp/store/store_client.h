// One thread's view of the store: operations run on an own thread with an own
// connection, so that no caller ever blocks longer than it wants to.
//
// A TCPStore client serialises its operations, and an operation on a stopped
// server never returns. Callers therefore wait for the thread, not for the
// store: until the result is there, or a failure is latched. They do not look
// for signals meanwhile: with a stopped server that is the heartbeat timeout.
//
// Thread-safe. Every method throws PeerFailureError once its generation has
// failed or the store is lost. An error of the store loses the store (see
// RunState::lose_store); the PeerFailureError is then that of the loss. Where
// runs survive failures, writes also look at the generation's `abort` key
// first: a rank that was stopped for long must not write into its successors'
// affairs.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autodp/failure/failure.h"
#include "autodp/failure/run_state.h"
#include "autodp/failure/task_thread.h"

namespace pipetransformer::autodp {

class StoreClient {
 public:
  // `store`: a connection that nobody else uses. `store_rank`: who serves it,
  // -1: nobody of ours; named in the failure.
  StoreClient(
      c10::intrusive_ptr<c10d::Store> store,
      std::shared_ptr<RunState> run,
      int store_rank);

  void set(const std::string& key, const std::string& value);
  // The value, or nullopt when the key is not there. Never waits for a key.
  std::optional<std::string> read(const std::string& key);
  // Writes `desired` if the key holds `expected` (empty: is not there); returns
  // what the key holds afterwards.
  std::string compare_set(
      const std::string& key,
      const std::string& expected,
      const std::string& desired);
  void remove(const std::vector<std::string>& keys);
  // Same without waiting for the store; nothing once the run failed or stop()
  // was called. Never throws; an error of the store is latched.
  void remove_later(std::vector<std::string> keys);

  // Waits until all keys of one group exist; returns that group's index (the
  // first of several), or -1 after `slice`.
  int wait_any(
      const std::vector<std::vector<std::string>>& groups,
      std::chrono::milliseconds slice);

  // Any other operation, for as long as `latch` (of the operation's generation)
  // has not failed; null: whatever failed, until the store is lost. `operation`
  // must not wait for keys, and may outlive the caller: it owns what it uses.
  void run_with(
      const std::shared_ptr<FailureLatch>& latch,
      const std::function<void(c10d::Store&)>& operation);

  // Operations handed to the thread so far, each look of a wait included. One
  // may concern several keys.
  int64_t num_operations() const {
    return num_operations_.load();
  }

  // Runs what is queued, then ends the thread (bounded, see TaskThread).
  bool stop(std::chrono::milliseconds deadline) noexcept;

 private:
  template <typename Result>
  Result
  run(const std::shared_ptr<FailureLatch>& latch,
      std::function<Result(c10d::Store&)> operation);
  // Runs a write of the current generation, unless that is over.
  template <typename Result>
  Result write(std::function<Result(c10d::Store&)> operation);
  void check(const std::shared_ptr<FailureLatch>& latch) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<RunState> run_;
  int store_rank_;
  std::atomic<int64_t> num_operations_{0};
  TaskThread thread_;
};

// The failure that a store's exception stands for.
Failure store_failure(int store_rank, const std::exception& error);

// Never waits, also when the key is deleted at this moment.
std::optional<std::string> read_key(c10d::Store& store, const std::string& key);

}  // namespace pipetransformer::autodp
