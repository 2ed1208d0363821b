// Three ranks that change plans over a board, as one value: the model that
// protocol_model.cpp walks. The ranks' machines are the real ones; the board,
// time, and what a rank does with a plan are the model's.
//
// A World checks every operation of the board as it happens (see Invariant).
// Mutations plant bugs in the board or in a rank's use of its machine.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "autodp/protocol/transition.h"

namespace model {

constexpr int kRanks = 3;

enum class Invariant {
  kOneDecision,  // all that is ever written or believed of an epoch is the same
  kAllReady,     // COMMIT only after the word of every participant
  kWriterCommits,   // COMMIT only by the epoch's writer
  kOneWriter,       // the head names one writer per epoch, and goes up
  kPlanStays,       // a plan is written once
  kUseAfterCommit,  // a plan is used from its COMMIT on, and until the next
  kKeysStay,  // nothing of an epoch goes before the head is past it by three
  kKeysGo,    // in the end only few epochs are left
  kFencedIsSilent,  // a fenced rank writes nothing
  kFencedIsPast,    // a rank is fenced only if the head is past it by three, or
                    // its epoch was skipped
  kLineage,   // a committed plan follows what its participants had in force
  kProgress,  // whatever happened, every live rank can still end
};

enum class Mutation {
  kNone,
  kCommitWithoutAnswers,  // the writer takes silence for yes
  kRefusalIsYes,          // an answer is read without its content
  kDecisionOverwrites,    // compare_set of a decision writes in any case
  kBelievesItself,        // compare_set of a decision returns what was proposed
  kAnyoneCommits,      // an abort of a rank that is not the writer says COMMIT
  kUsesOnAnswer,       // a rank uses the plan once it is ready
  kOldPlanStays,       // a rank goes on with the old plan after COMMIT
  kHeadOverwrites,     // the head is moved without looking
  kHeadWithoutWriter,  // two writers cannot tell their heads apart
  kRemovesRecent,      // one epoch too many is removed
  kRemovesNothing,
  kDecisionReturns,  // compare_set from OPEN creates a key that was removed
  kFencedGoesOn,     // a fenced rank answers once more
  kNoDeadline,       // only the writer looks at the clock
  kNobodyCloses,     // the head moves on over an undecided epoch
  kAnyLineage,       // a plan that follows another one is accepted
  kPlanTwice,        // a plan changes after it was written
};

const char* name(Invariant invariant);

// What may happen in a walk. Every rank goes through `epochs` plan epochs.
struct Scenario {
  const char* name;
  int epochs;
  int crashes;  // ranks that may die, before any operation
  bool
      late_writes;  // a dead rank's last operation may happen at any later time
  int refusals;     // answers that may be no
  int deadlines;    // how many times the deadline of a rank may pass
  bool sleeper;     // ranks 0 and 2 only; 2 is left out after epoch 1, and may
                    // fall behind
  bool second_lead;  // rank 1 may drop epoch 1 at any time and announce epoch 2
  bool two_writers;  // rank 1 announces epoch 1 too
};

struct Violation {
  Invariant invariant;
  std::string text;
};

enum class Stage : uint8_t {
  kBetween,  // epochs
  kAnnounce,
  kReceive,
  kMeet,
  kAnswer,
  kDecide,
  kEnded,
  kLastWrite,  // dead, but its operation under way may still happen
  kDead,
};

struct Actor {
  std::optional<pipetransformer::autodp::Transition> machine;
  Stage stage = Stage::kBetween;
  int64_t epoch = 0;  // of the machine, or of the last one
  bool late = false;  // the deadline of this epoch has passed
  bool fenced = false;
  bool leads = false;
  int64_t plan = 0;        // epoch of the plan in use
  int64_t committed = 0;   // last epoch whose decision it was told is COMMIT
  std::string parent;      // hash of the plan in use
  std::set<int> left_out;  // ranks that were missing or refused

  bool alive() const {
    return stage < Stage::kLastWrite;
  }
};

// What really happened, whatever the board holds by now.
struct History {
  std::map<int64_t, int> writers;
  std::map<int64_t, std::string> decisions;
  std::map<int64_t, std::string> plans;
  std::set<std::pair<int64_t, int>> ready;  // (epoch, rank) said yes
};

struct Action {
  enum class Kind : uint8_t {
    kStep,
    kRefuse,  // a step that answers no
    kDeadline,
    kTakeLead,
    kCrash,
    kLastWrite,
  };
  Kind kind;
  int rank;
};

class World {
 public:
  World(const Scenario& scenario, Mutation mutation);

  // All that is possible now; steps that change nothing are among it.
  std::vector<Action> actions() const;
  void perform(Action action);

  // Nobody has anything left to do, or waits for a plan that nobody will write.
  bool ended() const;
  // The scenario has run out of deadlines, which real time does not.
  bool out_of_time() const {
    return deadlines_ == scenario_.deadlines &&
           deadlines_ < kRanks * scenario_.epochs;
  }
  // The invariants of a world that has ended.
  void check_end();

  // Everything that decides what can happen next.
  std::string encode() const;

  const std::optional<Violation>& violation() const {
    return violation_;
  }

 private:
  friend class ModelBoard;

  void step(int rank, bool refuses);
  bool begin(int rank);   // the next epoch; false: none is left
  void finish(int rank);  // what was asked for is done
  void learn(Actor& actor);
  void violate(Invariant invariant, const std::string& text);

  Scenario scenario_;
  Mutation mutation_;
  std::map<std::string, std::string> keys_;
  std::array<Actor, kRanks> actors_;
  History history_;
  int crashes_ = 0;
  int refusals_ = 0;
  int deadlines_ = 0;
  bool took_lead_ = false;
  std::optional<Violation> violation_;
};

}  // namespace model
