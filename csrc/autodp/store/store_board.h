// The board of the protocol on the run's store, and the loop that steps a
// transition on it.
//
// Each operation ends with its result or, once a failure is latched, with
// PeerFailureError (see StoreClient). Call without the GIL. Not thread-safe.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "autodp/protocol/transition.h"
#include "autodp/store/board.h"
#include "autodp/store/store_client.h"

namespace pipetransformer::autodp {

class StoreBoard : public Board {
 public:
  // `prefix`: put before each key.
  StoreBoard(StoreClient& client, std::string prefix)
      : client_(client), prefix_(std::move(prefix)) {}

  std::optional<std::string> read(const std::string& key) override;
  bool exist(const std::vector<std::string>& keys) override;
  void set(const std::string& key, const std::string& value) override;
  std::string compare_set(
      const std::string& key,
      const std::string& expected,
      const std::string& desired) override;
  void remove(const std::vector<std::string>& keys) override;

 private:
  std::vector<std::string>
  with_prefix(const std::vector<std::string>& keys) const;

  StoreClient& client_;
  const std::string prefix_;
};

// Steps until what was asked for is done (true), or for `slice` (false): the
// caller looks for signals and deadlines of its own and calls again.
bool drive(
    Transition& transition,
    Board& board,
    std::chrono::milliseconds slice);

}  // namespace pipetransformer::autodp
