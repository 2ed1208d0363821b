// The two threads that find failures: one talks to the store, one does not.
//
// The store thread beats (`hb/<rank>`), checks that its successor in the ring
// of the generation's members beats, looks for the generation's `abort` key,
// and writes it when this rank failed first. Where the run survives failures it
// goes on beating during the rendezvous, and follows into the next generation;
// the store then is the only thing it takes along. The monitor thread watches
// the store thread (a stopped server blocks it for ever) and the signal pipe.
// Both only ever tell RunState; everything else listens to its latch. Neither
// touches Python.
//
// Thread-safe. stop() is bounded: an unanswered store does not hold it up.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "autodp/failure/run_state.h"

namespace pipetransformer::autodp {

struct WatcherOptions {
  int rank = 0;
  int world_size = 1;
  int store_rank = -1;  // who serves the store, -1: nobody of ours
  double heartbeat_interval_s = 1.0;
  double heartbeat_timeout_s = 10.0;
  bool survives = false;  // survivors of a failure go on, see RunState
};

class Watcher {
 public:
  // `store`: a connection that nobody else uses.
  Watcher(
      c10::intrusive_ptr<c10d::Store> store,
      std::shared_ptr<RunState> run,
      const WatcherOptions& options);
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // Bytes readable at `read_fd` are signal numbers (Python's wakeup fd). Those
  // of `ends` end this rank, in the phase that is given there by number; all
  // bytes are passed on to `forward_fd` unless it is -1. The caller keeps both
  // open until unwatch_signals() has returned.
  void
  watch_signals(int read_fd, int forward_fd, std::map<int, std::string> ends);
  void unwatch_signals();

  // Ends both threads. A failure that this rank latched is still written to the
  // store first, and that this rank leaves, within the deadline.
  void stop(std::chrono::milliseconds deadline) noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread store_thread_;
  std::thread monitor_thread_;
};

}  // namespace pipetransformer::autodp
