#include "autodp/decision.h"

#include <stdexcept>
#include <string>

namespace pipetransformer::autodp {

DecisionMachine::DecisionMachine(
    bool writer,
    const std::vector<int>& participants)
    : writer_(writer), missing_(participants.begin(), participants.end()) {
  if (missing_.empty() || missing_.size() != participants.size()) {
    throw std::invalid_argument(
        "participants: expected distinct ranks, at least one, got " +
        std::to_string(participants.size()) + " entries with " +
        std::to_string(missing_.size()) + " distinct ranks");
  }
}

void DecisionMachine::on_acknowledge(int rank, bool ok) {
  if (missing_.erase(rank) > 0 && !ok) {
    refused_ = true;
  }
}

void DecisionMachine::on_decision(Outcome outcome) {
  if (outcome_.has_value() && *outcome_ != outcome) {
    throw std::logic_error(
        "decision: expected one outcome per plan epoch, got two; please "
        "report");
  }
  outcome_ = outcome;
}

std::optional<Outcome> DecisionMachine::proposal() const {
  if (outcome_.has_value()) {
    return std::nullopt;
  }
  if (refused_ || deadline_passed_) {
    return Outcome::kAbort;
  }
  if (writer_ && missing_.empty()) {
    return Outcome::kCommit;
  }
  return std::nullopt;
}

}  // namespace pipetransformer::autodp
