// What one rank may propose for the decision of a plan epoch, given what it has
// seen. Torch-free and pure: no store, no clock, so that every interleaving can
// be enumerated in a test.
//
// The decision itself is a store key that is written once (compare_set): two
// ranks may propose different outcomes, exactly one wins, and all read it.
// (Two-phase commit whose coordinator blocks nobody: anyone aborts for it.)
#pragma once

#include <optional>
#include <set>
#include <vector>

namespace pipetransformer::autodp {

enum class Outcome { kCommit, kAbort };

class DecisionMachine {
 public:
  // `participants`: every rank that must acknowledge, the writer included.
  // Throws std::invalid_argument when it is empty or names a rank twice.
  DecisionMachine(bool writer, const std::vector<int>& participants);

  // An acknowledgement was seen. A rank that is no participant is ignored, and
  // so is a second one of the same rank.
  void on_acknowledge(int rank, bool ok);
  void on_deadline() {
    deadline_passed_ = true;
  }
  // The decision key was read, or the own proposal won or lost against it. The
  // first one stays: a later, different one is our bug and throws
  // std::logic_error.
  void on_decision(Outcome outcome);

  // What to try to write now; nullopt: wait. Only the writer proposes a commit,
  // and only with every acknowledgement; anyone proposes an abort after a
  // refusal or the deadline. Never anything once the decision is known.
  std::optional<Outcome> proposal() const;

  std::optional<Outcome> outcome() const {
    return outcome_;
  }
  // Participants that have not acknowledged, ascending.
  std::vector<int> missing() const {
    return {missing_.begin(), missing_.end()};
  }

 private:
  bool writer_;
  std::set<int> missing_;
  bool refused_ = false;
  bool deadline_passed_ = false;
  std::optional<Outcome> outcome_;
};

}  // namespace pipetransformer::autodp
