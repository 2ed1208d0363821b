// One thread's view of the store: operations run on an own thread with an own
// connection, so that no caller ever blocks longer than it wants to.
//
// A TCPStore client serialises its operations, and an operation on a stopped
// server never returns. Callers therefore wait for the thread, not for the
// store: until the result is there, or a failure is latched. They do not look
// for signals meanwhile: with a stopped server that is the heartbeat timeout.
//
// Thread-safe. Every method throws PeerFailureError once a failure is latched,
// and latches one of phase "store" when the store reports an error.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autodp/failure.h"
#include "autodp/task_thread.h"

namespace pipetransformer::autodp {

class StoreClient {
 public:
  // Takes its own clone of `store`. `store_rank`: who serves it, -1: nobody of
  // ours; named in the failure.
  StoreClient(
      const c10::intrusive_ptr<c10d::Store>& store,
      std::shared_ptr<FailureLatch> latch,
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

  // Runs what is queued, then ends the thread (bounded, see TaskThread).
  bool stop(std::chrono::milliseconds deadline) noexcept;

 private:
  template <typename Result>
  Result run(std::function<Result(c10d::Store&)> operation);

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<FailureLatch> latch_;
  int store_rank_;
  TaskThread thread_;
};

// The failure that a store's exception stands for.
Failure store_failure(int store_rank, const std::exception& error);

std::optional<std::string> read_key(c10d::Store& store, const std::string& key);

}  // namespace pipetransformer::autodp
