// What one rank knows about its run: the generation it lives in, whether the
// store still answers, and whether this rank itself has to end.
//
// Torch-free and thread-safe. A generation is a set of ranks that live and fail
// together: it has one failure. After it, the survivors form the next one
// (membership.h), with a latch of its own; groups and waits of the old one keep
// the old latch and never come back to life.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "autodp/failure/failure.h"

namespace pipetransformer::autodp {

struct Generation {
  int64_t number = 0;
  std::vector<int> members;  // world ranks, ascending
  std::shared_ptr<FailureLatch> latch;

  // The store's key for `name` of this generation: "gen/<number>/<name>".
  std::string key(const std::string& name) const;
};

class RunState {
 public:
  // `members`: all ranks. `survives`: whether a generation may follow the
  // first one, and the loss of the store may be outlived.
  RunState(int rank, const std::vector<int>& members, bool survives);
  RunState(const RunState&) = delete;
  RunState& operator=(const RunState&) = delete;

  bool survives() const {
    return survives_;
  }
  std::shared_ptr<const Generation> generation() const;

  // Starts the next generation. It is born failed when this rank has to end, or
  // has lost the store: no plan is in force yet, so nothing can outlive it.
  // Throws std::invalid_argument when the one before lives, or this rank is no
  // member.
  void advance(const std::vector<int>& members);

  void set_epoch(int64_t epoch);

  // Latches a failure that this rank found itself. One of its own (user error,
  // SIGTERM) ends this rank: it takes part in no later generation.
  void fail(Failure failure);
  // The failure that ends this rank.
  std::optional<Failure> ended() const;

  // The store does not answer any more. Latched as the generation's failure,
  // unless this rank outlives the store: then only noted, and from here on
  // every symptom of a lost peer is latched at once. The first loss stays.
  void lose_store(Failure loss);
  std::optional<Failure> store_loss() const;
  // Whether this rank can go on without the store. Ignored unless the run
  // survives; taking it back after a loss latches that loss. Holds for this
  // generation.
  void outlive_store(bool outlives);

 private:
  const int rank_;
  const bool survives_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Generation> generation_;
  int64_t epoch_ = -1;
  bool outlives_ = false;
  std::optional<Failure> ended_;
  std::optional<Failure> loss_;
};

}  // namespace pipetransformer::autodp
