// The writer's first part: from claiming an epoch to its plan being there.
#include <algorithm>

#include "autodp/protocol/transition.h"

namespace pipetransformer::autodp {

namespace {

constexpr int64_t kKeptEpochs = 2;  // alongside that of the head

}  // namespace

int64_t announced_epoch(Board& board) {
  return decode_head(board.read("head")).epoch;
}

bool Transition::is_past(Board& board) const {
  return announced_epoch(board) > options_.epoch + kKeptEpochs;
}

void Transition::announce(const std::string& plan) {
  request("announce", options_.writer && !start_s_, Op::kReadHead);
  plan_ = encode(PlanMessage{
      options_.epoch,
      options_.run,
      options_.parent.value_or(""),
      options_.rank,
      options_.participants,
      plan});
}

Progress Transition::step_announce(Board& board, double now_s) {
  switch (op_) {
    case Op::kReadHead:
      return on_head(board.read("head"));
    case Op::kCloseOpen:
      return move(
          close(board, kOpen) == kOpen ? Op::kCloseMissing : Op::kFindFloor);
    case Op::kCloseMissing:  // its writer had not opened it
      return move(close(board, "") == kOpen ? Op::kCloseOpen : Op::kFindFloor);
    case Op::kFindFloor:
      // That plan is there: what its writer had to remove is gone.
      floor_ = head_.floor;
      if (board.exist({"plan/" + std::to_string(head_.epoch)})) {
        floor_ = std::max(floor_, head_.epoch - kKeptEpochs);
      }
      return move(Op::kClaimHead);
    case Op::kClaimHead: {
      const PlanHead mine{options_.epoch, floor_, options_.rank};
      return on_claim(board.compare_set("head", head_bytes_, encode(mine)));
    }
    case Op::kRemoveOld:
      board.remove(old_keys());
      return move(Op::kOpenDecision);
    case Op::kOpenDecision:
      if (board.compare_set(key("decision"), "", kOpen) == kOpen) {
        return move(Op::kWritePlan);
      }
      return fail_announce("given up before its plan was written");
    case Op::kWritePlan:
      board.set(key("plan"), plan_);
      return move(Op::kConfirmHead);
    default:  // kConfirmHead
      return on_confirmed_head(decode_head(board.read("head")), now_s);
  }
}

Progress Transition::on_head(const std::optional<std::string>& value) {
  head_ = decode_head(value);
  head_bytes_ = value.value_or("");
  if (head_.epoch < 0) {
    floor_ = options_.epoch;
    return move(Op::kClaimHead);
  }
  if (head_.epoch >= options_.epoch) {
    return fail_announce(
        "expected one above the head " + std::to_string(head_.epoch));
  }
  return move(Op::kCloseOpen);
}

std::string Transition::close(Board& board, const char* expected) const {
  const Verdict verdict{
      Outcome::kAbort,
      {},
      {},
      "superseded by plan epoch " + std::to_string(options_.epoch)};
  return board.compare_set(
      "decision/" + std::to_string(head_.epoch), expected, encode(verdict));
}

Progress Transition::on_claim(const std::string& value) {
  const auto now = decode_head(value);
  if (now.epoch == options_.epoch && now.writer == options_.rank) {
    return move(old_keys().empty() ? Op::kOpenDecision : Op::kRemoveOld);
  }
  if (head_.epoch >= 0 && now.epoch > head_.epoch + kKeptEpochs) {
    stale_ = {"decision/" + std::to_string(head_.epoch)};
  }
  return fail_announce(
      "expected one writer, got rank " + std::to_string(now.writer) +
      " with plan epoch " + std::to_string(now.epoch));
}

// The plan may have been written long after the head was moved.
Progress Transition::on_confirmed_head(const PlanHead& head, double now_s) {
  if (head.epoch == options_.epoch) {
    on_plan(plan_, now_s);
    return participates() ? move(Op::kSayHere) : done();
  }
  if (head.epoch > options_.epoch + kKeptEpochs) {
    stale_ = {key("plan"), key("decision")};
  }
  return fail_announce(
      "superseded by plan epoch " + std::to_string(head.epoch));
}

Progress Transition::fail_announce(const std::string& error) {
  announce_error_ =
      "plan epoch " + std::to_string(options_.epoch) + ": " + error;
  return stale_.empty() ? done() : move(Op::kCleanUp);
}

std::vector<std::string> Transition::old_keys() const {
  std::vector<std::string> keys;
  const auto end = std::min(head_.epoch + 1, options_.epoch - kKeptEpochs);
  for (auto epoch = floor_; epoch < end; ++epoch) {
    const auto name = "/" + std::to_string(epoch);
    keys.push_back("plan" + name);
    keys.push_back("decision" + name);
    for (int rank = 0; rank < options_.world_size; ++rank) {
      keys.push_back("here" + name + "/" + std::to_string(rank));
      keys.push_back("ack" + name + "/" + std::to_string(rank));
    }
  }
  return keys;
}

}  // namespace pipetransformer::autodp
