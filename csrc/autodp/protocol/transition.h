// One rank's part in one change of plan: PREPARE, then COMMIT or ABORT. A state
// machine that never blocks: each step() does at most one operation of the
// board, so that a test can put the steps of several ranks into every order.
//
// Torch-free, not thread-safe; time is a plain value. See Note [Plan epochs].
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "autodp/protocol/decision.h"
#include "autodp/protocol/plan_message.h"
#include "autodp/store/board.h"

namespace pipetransformer::autodp {

struct TransitionOptions {
  int rank = 0;
  int world_size = 1;
  int64_t epoch = 0;              // above every epoch announced before
  bool writer = false;            // announces the plan; one rank does
  std::vector<int> participants;  // the writer's; others read them in the plan
  std::string run;                // equal on all ranks, one line
  // plan_hash of the plan in force, empty: none is; nullopt: not known here, so
  // a plan may follow any.
  std::optional<std::string> parent = "";
  double timeout_s = 30;  // from announce, or from receiving, to the decision
};

enum class Progress {
  kMoved,    // step again at once
  kWaiting,  // nothing new; step again a little later
  kDone,     // what was asked for is finished
};

// The latest epoch that any rank has announced, -1: none. Throws
// std::runtime_error where the board holds what no rank writes.
int64_t announced_epoch(Board& board);

class Transition {
 public:
  // Throws std::invalid_argument: a negative epoch; on the writer participants
  // that are none or not distinct.
  explicit Transition(TransitionOptions options);

  // What to do next; then step() until kDone. In this order: announce (the
  // writer), receive, meet, acknowledge, decide; receive may be left out on the
  // writer, meet and acknowledge by a rank that has nothing to prepare. Another
  // order throws std::logic_error.
  void announce(const std::string& plan);
  // Until the plan is there, without a deadline.
  void receive();
  // Until all participants have received the plan: see met().
  void meet();
  // Only participants are heard.
  void acknowledge(Answer answer);
  void decide();

  // One operation on the board at most. `now_s` is any steady clock. Throws
  // what the board throws, and may then be called again.
  Progress step(Board& board, double now_s);

  const std::optional<PlanMessage>& message() const {
    return message_;
  }
  // Of the message: the next plan's parent once this one is committed.
  const std::string& hash() const {
    return hash_;
  }
  // The plan does not belong to this run, epoch or lineage: why. acknowledge()
  // then refuses it in any case.
  const std::string& mismatch() const {
    return mismatch_;
  }
  // All participants were there: building what needs all of them may begin.
  bool met() const {
    return met_;
  }
  // Set by decide(), equal on all ranks.
  const std::optional<Verdict>& verdict() const {
    return verdict_;
  }
  // Why announce() failed (the epoch is taken, or at or below the head); the
  // transition is over.
  const std::string& announce_error() const {
    return announce_error_;
  }
  // Ranks that went on without this one have forgotten this epoch, or skipped
  // it; the transition is over, and this rank must not act on any plan.
  bool fenced() const {
    return fenced_;
  }

  // One look at the board, at any time. Whether the decision is there already:
  // before this rank has acknowledged it can only be an abort.
  bool is_decided(Board& board) const;
  // Whether the head is so far on that this epoch's keys may be removed.
  bool is_past(Board& board) const;

  // Everything that decides what comes next, for tests and logs.
  std::string describe() const;

 private:
  // The next operation of the board; kIdle: none, what was asked for is done.
  enum class Op {
    kIdle,
    kReadHead,
    kCloseOpen,
    kCloseMissing,
    kFindFloor,
    kClaimHead,
    kRemoveOld,
    kOpenDecision,
    kWritePlan,
    kConfirmHead,
    kSayHere,
    kReadPlan,
    kSeeHead,
    kSeeDecision,
    kMeetDecision,
    kMeetHere,
    kWriteAnswer,
    kReadDecision,
    kSeeHere,
    kSeeAnswers,
    kReadAnswer,
    kReadHere,
    kPropose,
    kCleanUp,
  };

  // transition_announce.cpp
  Progress step_announce(Board& board, double now_s);
  Progress on_head(const std::optional<std::string>& value);
  Progress on_claim(const std::string& value);
  Progress on_confirmed_head(const PlanHead& head, double now_s);
  Progress fail_announce(const std::string& error);
  std::string close(Board& board, const char* expected) const;
  std::vector<std::string> old_keys() const;

  // transition.cpp
  Progress step_receive(Board& board, double now_s);
  Progress step_meet(Board& board, double now_s);
  Progress step_decide(Board& board, double now_s);
  Progress undecided(double now_s);
  Progress collect(size_t position, double now_s);
  Progress settle(const std::string& value);
  Progress fence();
  Progress move(Op next);
  Progress wait(Op next);
  Progress done();
  void request(const char* what, bool allowed, Op first);
  void on_plan(const std::string& bytes, double now_s);
  bool participates() const;
  bool late(double now_s) const;

  std::string key(const char* kind) const;
  std::string key(const char* kind, int rank) const;
  std::vector<std::string>
  keys(const char* kind, const std::set<int>& ranks) const;

  TransitionOptions options_;
  Op op_ = Op::kIdle;
  std::string plan_;  // bytes of plan/<e>, on the writer
  PlanHead head_;     // as the writer found it
  std::string head_bytes_;
  int64_t floor_ = 0;               // lowest epoch that may have keys
  std::vector<std::string> stale_;  // keys that came too late, to be removed
  std::optional<double> start_s_;
  std::optional<PlanMessage> message_;
  std::string hash_;
  std::string mismatch_;
  Answer answer_;
  Ballot ballot_;
  size_t position_ = 0;   // in the participants, while their answers are read
  bool meeting_ = false;  // and that is for meet()
  bool met_ = false;
  bool answered_ = false;
  bool fenced_ = false;
  std::optional<Verdict> closed_;  // seen before the plan was
  std::optional<Verdict> verdict_;
  std::string announce_error_;
};

}  // namespace pipetransformer::autodp
