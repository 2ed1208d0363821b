// One rank's part in a rendezvous, over the store: membership.h's rules with
// keys, heartbeats and a clock. Keys of the rendezvous that forms generation g,
// below the run's prefix: `roll/<g>/<rank>` (the answer) and `roll/<g>/list`.
//
// Not thread-safe. step() blocks for a few operations of the store at most;
// call it without the GIL.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autodp/failure/liveness.h"
#include "autodp/failure/run_state.h"
#include "autodp/membership/membership.h"
#include "autodp/store/store_client.h"

namespace pipetransformer::autodp {

class RendezvousBoard {
 public:
  // For the generation after the one that `run` is in now, which has failed.
  // `standing`: bytes for the other survivors, opaque here.
  RendezvousBoard(
      std::shared_ptr<StoreClient> client,
      std::shared_ptr<RunState> run,
      int rank,
      double heartbeat_timeout_s,
      std::string standing);

  // One look at the store; returns whether the rendezvous is closed. The first
  // one writes this rank's answer, and before it the failure to the
  // generation's `abort` key: where there is a list, no rank that it leaves out
  // can still take the old generation for alive. A member that neither answers
  // nor beats for the heartbeat timeout is not waited for any longer. Throws
  // PeerFailureError when the store is lost.
  bool step();
  // From here on members are not waited for even if they beat.
  void on_deadline() {
    rules_.on_deadline();
  }

  int64_t generation() const {
    return next_;
  }
  // Members that have not answered yet.
  std::vector<int> silent() const {
    return rules_.silent();
  }
  bool fenced() const {
    return rules_.fenced();
  }
  // Once closed, unless fenced: the standings of the next generation's members.
  const std::map<int, std::string>& standings() const {
    return standings_;
  }

 private:
  struct Look;
  Look look();
  void observe(const Look& seen);
  std::optional<std::vector<int>> try_close(const std::vector<int>& members);
  std::vector<int> read_list(const std::string& text) const;
  void read_standings(const std::vector<int>& members);

  std::shared_ptr<StoreClient> client_;
  std::shared_ptr<RunState> run_;
  int rank_;
  int64_t next_;
  std::string abort_key_;
  std::string abort_;
  std::string answer_;
  bool answered_ = false;
  const std::vector<int> members_;  // of the generation that failed
  Rendezvous rules_;
  std::map<int, Heartbeat> beats_;
  std::map<int, std::string> standings_;
};

inline constexpr char kLeaves[] = "leaves";  // the answer of a rank that ends

std::string answer_key(int64_t generation, int rank);
std::string heartbeat_key(int rank);

}  // namespace pipetransformer::autodp
