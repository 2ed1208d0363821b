#include "autodp/protocol/transition.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "autodp/store/text_lines.h"

// Note [Plan epochs]
// ~~~~~~~~~~~~~~~~~~
// e is a counter of attempted plans. Its keys, and what makes each of them
// safe:
//
// head          "<e>, floor, writer": the latest epoch. Moved by compare_set
//               before anything of e is written, so an epoch has one writer,
//               also if two try (the writer's rank makes their values differ).
// decision/<e>  OPEN before the plan is there; leaves OPEN once, by
// compare_set.
//               A removed key cannot be decided: compare_set from OPEN writes
//               nothing where there is no key. So a rank that slept for long
//               needs no check that could be outdated a moment later.
// plan/<e>      written once, by the epoch's writer.
// here/<e>/<r>  r has received the plan.
// ack/<e>/<r>   r is ready, or why it is not.
//
// Who moves the head first closes the epoch before (ABORT if it is still open,
// or if its writer died before it opened it), so every announced epoch ends.
// Then it removes what is older than e-2. Only the head's writer removes, and
// only after the head has moved: a rank that finds no decision while it holds a
// plan knows that the head is past e+2. It is *fenced*: it was away for three
// changes of plan, removes what it may just have written, and never acts again.
//
// A writer may die between moving the head and removing. `floor` is the lowest
// epoch that may have keys left; it rises once the plan of the head's epoch is
// there, for that is written after the removal.

namespace pipetransformer::autodp {

namespace {

// Others are patient for longer: the writer knows who kept it waiting.
constexpr double kWriterPatience = 1.0;
constexpr double kOtherPatience = 1.25;

constexpr size_t kLongestRefusal = 2000;  // bytes; keys stay small

}  // namespace

Transition::Transition(TransitionOptions options)
    : options_(std::move(options)) {
  if (options_.epoch < 0) {
    throw std::invalid_argument(
        "epoch: expected a number from 0, got " +
        std::to_string(options_.epoch));
  }
  if (options_.writer) {
    ballot_ = Ballot(options_.rank, true, options_.participants);
  }
}

void Transition::receive() {
  request("receive", options_.writer == message_.has_value(), Op::kReadPlan);
  if (message_.has_value()) {
    op_ = Op::kIdle;  // its own
  }
}

void Transition::meet() {
  request(
      "meet",
      message_.has_value(),
      ballot_.absent().empty() ? Op::kMeetDecision : Op::kMeetHere);
  if (!participates()) {
    op_ = Op::kIdle;
  }
}

void Transition::acknowledge(Answer answer) {
  request("acknowledge", start_s_.has_value() && !answered_, Op::kWriteAnswer);
  answered_ = true;
  answer_ = mismatch_.empty() ? std::move(answer) : Answer{mismatch_, false};
  if (answer_.refusal.size() > kLongestRefusal) {
    answer_.refusal.resize(kLongestRefusal);
  }
  if (!participates()) {
    op_ = Op::kIdle;
  }
}

void Transition::decide() {
  request("decide", start_s_.has_value(), Op::kReadDecision);
}

void Transition::request(const char* what, bool allowed, Op first) {
  if (op_ != Op::kIdle || fenced_ || verdict_.has_value() ||
      !announce_error_.empty() || !allowed) {
    throw std::logic_error(
        std::string("transition: expected an earlier step before '") + what +
        "', got " + describe() + "; please report");
  }
  op_ = first;
}

Progress Transition::step(Board& board, double now_s) {
  switch (op_) {
    case Op::kIdle:
      return Progress::kDone;
    case Op::kReadHead:
    case Op::kCloseOpen:
    case Op::kCloseMissing:
    case Op::kFindFloor:
    case Op::kClaimHead:
    case Op::kRemoveOld:
    case Op::kOpenDecision:
    case Op::kWritePlan:
    case Op::kConfirmHead:
      return step_announce(board, now_s);
    case Op::kReadPlan:
    case Op::kSeeHead:
    case Op::kSeeDecision:
      return step_receive(board, now_s);
    case Op::kSayHere:
      board.set(key("here", options_.rank), "1");
      ballot_.on_here(options_.rank);
      return done();
    case Op::kMeetHere:
    case Op::kMeetDecision:
      return step_meet(board, now_s);
    case Op::kWriteAnswer:
      board.set(key("ack", options_.rank), encode(answer_));
      ballot_.on_answer(options_.rank, answer_);
      return done();
    case Op::kCleanUp:
      board.remove(stale_);
      stale_.clear();
      return done();
    default:
      return step_decide(board, now_s);
  }
}

Progress Transition::step_receive(Board& board, double now_s) {
  if (op_ == Op::kReadPlan) {
    if (const auto bytes = board.read(key("plan"))) {
      on_plan(*bytes, now_s);
      return participates() ? move(Op::kSayHere) : done();
    }
    if (closed_.has_value() && closed_->outcome == Outcome::kAbort) {
      verdict_ = closed_;  // given up before its plan was written
      return done();
    }
    return move(Op::kSeeHead);
  }
  if (op_ == Op::kSeeHead) {
    const auto head = decode_head(board.read("head"));
    return head.epoch > options_.epoch ? move(Op::kSeeDecision)
                                       : wait(Op::kReadPlan);
  }
  const auto value = board.read(key("decision"));
  if (!value.has_value()) {
    return fence();
  }
  if (*value != kOpen) {
    closed_ = decode_verdict(*value);
  }
  return move(Op::kReadPlan);
}

bool Transition::is_decided(Board& board) const {
  return board.read(key("decision")) != kOpen;
}

void Transition::on_plan(const std::string& bytes, double now_s) {
  message_ = decode_plan(bytes);
  mismatch_ =
      find_mismatch(message_, options_.epoch, options_.run, options_.parent);
  if (!message_.has_value()) {  // refused by this rank, whoever was asked
    message_ = PlanMessage{options_.epoch, "", "", -1, {options_.rank}, ""};
  }
  hash_ = plan_hash(bytes);
  options_.participants = message_->participants;
  ballot_ = Ballot(message_->writer, options_.writer, options_.participants);
  start_s_ = now_s;
}

Progress Transition::step_meet(Board& board, double now_s) {
  if (op_ == Op::kMeetHere) {
    if (board.exist(keys("here", ballot_.absent()))) {
      ballot_.on_all_here();
    }
    return move(Op::kMeetDecision);
  }
  const auto value = board.read(key("decision"));
  if (!value.has_value()) {
    return fence();
  }
  if (*value != kOpen) {
    return done();
  }
  if (ballot_.absent().empty()) {
    met_ = true;
    return done();
  }
  if (!late(now_s)) {
    return wait(Op::kMeetHere);
  }
  meeting_ = true;
  return collect(0, now_s);
}

Progress Transition::step_decide(Board& board, double now_s) {
  const auto rank = [this] { return options_.participants.at(position_); };
  switch (op_) {
    case Op::kReadDecision: {
      const auto value = board.read(key("decision"));
      if (!value.has_value()) {
        return fence();
      }
      return *value == kOpen ? undecided(now_s) : settle(*value);
    }
    case Op::kSeeAnswers:
      if (board.exist(keys("ack", ballot_.unanswered()))) {
        return collect(0, now_s);
      }
      return ballot_.knows_refusal() ? move(Op::kSeeHere)
                                     : wait(Op::kReadDecision);
    case Op::kSeeHere:
      if (!board.exist(keys("here", ballot_.absent()))) {
        return wait(Op::kReadDecision);
      }
      ballot_.on_all_here();
      return move(Op::kReadDecision);
    case Op::kReadAnswer:
      if (const auto value = board.read(key("ack", rank()))) {
        ballot_.on_answer(rank(), decode_answer(*value));
      } else if (ballot_.absent().count(rank()) > 0) {
        return move(Op::kReadHere);
      }
      return collect(position_ + 1, now_s);
    case Op::kReadHere:
      if (board.exist({key("here", rank())})) {
        ballot_.on_here(rank());
      }
      return collect(position_ + 1, now_s);
    default: {  // kPropose
      const bool commits = ballot_.proposal() == Outcome::kCommit;
      const auto mine = commits ? Verdict{Outcome::kCommit, {}, {}, ""}
                                : ballot_.abort(options_.timeout_s);
      const auto value =
          board.compare_set(key("decision"), kOpen, encode(mine));
      return value == kOpen ? fence() : settle(value);  // open: it was removed
    }
  }
}

Progress Transition::undecided(double now_s) {
  if (ballot_.proposal().has_value()) {
    return move(Op::kPropose);
  }
  if (late(now_s)) {
    return collect(0, now_s);
  }
  if (options_.writer) {
    return move(Op::kSeeAnswers);
  }
  return ballot_.knows_refusal() ? move(Op::kSeeHere) : wait(Op::kReadDecision);
}

// Reads what the participants from `position` on have said, then goes on with
// what follows from it.
Progress Transition::collect(size_t position, double now_s) {
  const auto& ranks = options_.participants;
  const auto unknown = [this](int rank) {
    return ballot_.unanswered().count(rank) > 0;
  };
  const auto next = std::find_if(
      ranks.begin() + static_cast<ptrdiff_t>(position), ranks.end(), unknown);
  position_ = static_cast<size_t>(next - ranks.begin());
  if (next != ranks.end()) {
    return move(Op::kReadAnswer);
  }
  if (meeting_) {
    meeting_ = false;
    met_ = ballot_.absent().empty();
    if (!met_) {
      ballot_.on_deadline();
    }
    return done();
  }
  if (!ballot_.proposal().has_value() && late(now_s)) {
    ballot_.on_deadline();
  }
  return move(ballot_.proposal() ? Op::kPropose : Op::kReadDecision);
}

Progress Transition::settle(const std::string& value) {
  verdict_ = decode_verdict(value);
  return done();
}

Progress Transition::fence() {
  fenced_ = true;
  stale_ = {key("here", options_.rank), key("ack", options_.rank)};
  return move(Op::kCleanUp);
}

Progress Transition::move(Op next) {
  op_ = next;
  return Progress::kMoved;
}

Progress Transition::wait(Op next) {
  op_ = next;
  return Progress::kWaiting;
}

Progress Transition::done() {
  op_ = Op::kIdle;
  return Progress::kDone;
}

bool Transition::participates() const {
  const auto& ranks = options_.participants;
  return std::find(ranks.begin(), ranks.end(), options_.rank) != ranks.end();
}

bool Transition::late(double now_s) const {
  const double patience = options_.writer ? kWriterPatience : kOtherPatience;
  return start_s_ && now_s - *start_s_ >= patience * options_.timeout_s;
}

std::string Transition::key(const char* kind) const {
  return std::string(kind) + "/" + std::to_string(options_.epoch);
}

std::string Transition::key(const char* kind, int rank) const {
  return key(kind) + "/" + std::to_string(rank);
}

std::vector<std::string>
Transition::keys(const char* kind, const std::set<int>& ranks) const {
  std::vector<std::string> all;
  for (const int rank : ranks) {
    all.push_back(key(kind, rank));
  }
  return all;
}

std::string Transition::describe() const {
  std::string text = "epoch " + std::to_string(options_.epoch) +
                     ", operation " + std::to_string(static_cast<int>(op_)) +
                     ", flags ";
  for (const bool flag :
       {options_.writer,
        start_s_.has_value(),
        meeting_,
        met_,
        answered_,
        fenced_,
        closed_.has_value(),
        ballot_.deadline_passed(),
        ballot_.knows_refusal()}) {
    text += flag ? '1' : '0';
  }
  text += ", without answer [" + join_numbers(ballot_.unanswered()) +
          "], absent [" + join_numbers(ballot_.absent()) + "], position " +
          std::to_string(position_) + ", head " + std::to_string(head_.epoch) +
          " from " + std::to_string(floor_) + ", plan '" + hash_ + "'" +
          mismatch_ + announce_error_;
  if (verdict_.has_value()) {
    text += ", decided " + encode(*verdict_);
  }
  return text;
}

}  // namespace pipetransformer::autodp
