// What one rank may propose for the decision of a plan epoch, given what it has
// seen, and how a decision is written. Torch-free and pure: no store, no clock.
//
// The decision itself is a key that leaves "open" once, by compare_set: two
// ranks may propose different outcomes, exactly one wins, and all read it.
// (Two-phase commit whose coordinator blocks nobody: anyone aborts for it.)
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace pipetransformer::autodp {

enum class Outcome { kCommit, kAbort };

// The value of decision/<e> while nothing is decided.
inline constexpr const char* kOpen = "OPEN";

struct Verdict {
  Outcome outcome = Outcome::kAbort;
  // Of an abort: ranks that kept the others waiting until the deadline, and
  // ranks that refused; ascending.
  std::vector<int> missing;
  std::vector<int> refused;
  std::string reason;  // of an abort, for people

  bool operator==(const Verdict&) const = default;
};

// Bytes of decision/<e>. Foreign bytes decode to an abort with those bytes as
// its reason.
std::string encode(const Verdict& verdict);
Verdict decode_verdict(std::string_view bytes);

// What a participant acknowledges with.
struct Answer {
  std::string refusal;  // why it cannot take part, empty: it is ready
  bool waited = false;  // it refuses since others kept it waiting

  bool operator==(const Answer&) const = default;
};

// Bytes of ack/<e>/<rank>. Foreign bytes decode to a refusal.
std::string encode(const Answer& answer);
Answer decode_answer(std::string_view bytes);

class Ballot {
 public:
  Ballot() = default;
  // `participants`: every rank that must acknowledge. Throws
  // std::invalid_argument when it is empty or names a rank twice.
  Ballot(int writer, bool writes, const std::vector<int>& participants);

  // News of a rank; of one that is no participant they are ignored, and so is
  // a second answer.
  void on_here(int rank);
  void on_answer(int rank, const Answer& answer);
  void on_all_here();
  void on_deadline() {
    deadline_passed_ = true;
  }

  // What to try to write now; nullopt: wait. Only the writer proposes a commit,
  // and only when every participant is ready. Anyone proposes an abort: of a
  // refusal once all have received the plan, so that nobody who is only a
  // moment behind is called missing; of one because of others once all have
  // answered; of anything after the deadline.
  std::optional<Outcome> proposal() const;

  // The abort to write; `timeout_s` is the deadline it speaks of.
  Verdict abort(double timeout_s) const;

  // Of a rank that did not wait for others.
  bool knows_refusal() const {
    return !refused_.empty();
  }
  bool deadline_passed() const {
    return deadline_passed_;
  }
  // Participants without answer, and those that have not even received the
  // plan; ascending.
  const std::set<int>& unanswered() const {
    return unanswered_;
  }
  const std::set<int>& absent() const {
    return absent_;
  }

 private:
  int writer_ = 0;
  bool writes_ = false;
  bool deadline_passed_ = false;
  std::set<int> unanswered_;
  std::set<int> absent_;
  std::set<int> refused_;  // that did not wait for others
  std::map<int, std::string> refusals_;
};

}  // namespace pipetransformer::autodp
