#include "autodp/membership/membership.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pipetransformer::autodp {

Rendezvous::Rendezvous(int rank, const std::vector<int>& members)
    : rank_(rank), silent_(members.begin(), members.end()) {
  if (silent_.size() != members.size() || !silent_.contains(rank)) {
    throw std::invalid_argument(
        "members: expected distinct ranks with rank " + std::to_string(rank) +
        " among them, got " + std::to_string(members.size()) +
        " of another kind");
  }
}

void Rendezvous::on_answer(int rank, bool stays) {
  if (silent_.erase(rank) > 0 && stays) {
    staying_.insert(rank);
  }
}

void Rendezvous::on_gone(int rank) {
  gone_.insert(rank);
}

void Rendezvous::on_closed(const std::vector<int>& list) {
  if (closed_.has_value() && *closed_ != list) {
    throw std::logic_error(
        "rendezvous: expected one list, got two different ones; please report");
  }
  closed_ = list;
}

std::optional<std::vector<int>> Rendezvous::proposal() const {
  if (closed_.has_value() || !staying_.contains(rank_)) {
    return std::nullopt;
  }
  const bool complete =
      std::includes(gone_.begin(), gone_.end(), silent_.begin(), silent_.end());
  if (!complete && !deadline_passed_) {
    return std::nullopt;
  }
  return std::vector<int>(staying_.begin(), staying_.end());
}

std::vector<int> Rendezvous::silent() const {
  return {silent_.begin(), silent_.end()};
}

bool Rendezvous::fenced() const {
  return closed_.has_value() &&
         !std::binary_search(closed_->begin(), closed_->end(), rank_);
}

}  // namespace pipetransformer::autodp
