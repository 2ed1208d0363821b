#include "autodp/protocol/decision.h"

#include <array>
#include <cstdio>
#include <stdexcept>

#include "autodp/store/text_lines.h"
#include "core/plain_text.h"

namespace pipetransformer::autodp {

namespace {

constexpr const char* kCommitText = "COMMIT";
constexpr const char* kAbortText = "ABORT";
constexpr const char* kReadyText = "ok";
constexpr const char* kRefusedText = "refused";
constexpr const char* kWaitedText = "waited";

}  // namespace

std::string encode(const Verdict& verdict) {
  if (verdict.outcome == Outcome::kCommit) {
    return kCommitText;
  }
  return std::string(kAbortText) + "\n" + join_numbers(verdict.missing) + "\n" +
         join_numbers(verdict.refused) + "\n" + verdict.reason;
}

Verdict decode_verdict(std::string_view bytes) {
  Verdict verdict;
  if (bytes == kCommitText) {
    verdict.outcome = Outcome::kCommit;
    return verdict;
  }
  auto rest = bytes;
  if (take_line(rest) == kAbortText &&
      parse_numbers(take_line(rest), verdict.missing) &&
      parse_numbers(take_line(rest), verdict.refused)) {
    verdict.reason = core::plain_text(rest);
    return verdict;
  }
  return Verdict{Outcome::kAbort, {}, {}, core::plain_text(bytes)};
}

std::string encode(const Answer& answer) {
  if (answer.refusal.empty()) {
    return kReadyText;
  }
  return std::string(answer.waited ? kWaitedText : kRefusedText) + "\n" +
         answer.refusal;
}

Answer decode_answer(std::string_view bytes) {
  if (bytes == kReadyText) {
    return {};
  }
  auto rest = bytes;
  const auto kind = take_line(rest);
  if (rest.empty() || (kind != kRefusedText && kind != kWaitedText)) {
    return {bytes.empty() ? "no reason" : core::plain_text(bytes), false};
  }
  return {core::plain_text(rest), kind == kWaitedText};
}

Ballot::Ballot(int writer, bool writes, const std::vector<int>& participants)
    : writer_(writer),
      writes_(writes),
      unanswered_(participants.begin(), participants.end()),
      absent_(unanswered_) {
  if (unanswered_.empty() || unanswered_.size() != participants.size()) {
    throw std::invalid_argument(
        "participants: expected distinct ranks, at least one, got " +
        std::to_string(participants.size()) + " entries with " +
        std::to_string(unanswered_.size()) + " distinct ranks");
  }
}

void Ballot::on_here(int rank) {
  absent_.erase(rank);
}

void Ballot::on_all_here() {
  absent_.clear();
}

void Ballot::on_answer(int rank, const Answer& answer) {
  absent_.erase(rank);
  if (unanswered_.erase(rank) == 0 || answer.refusal.empty()) {
    return;
  }
  refusals_.emplace(rank, answer.refusal);
  if (!answer.waited) {
    refused_.insert(rank);
  }
}

std::optional<Outcome> Ballot::proposal() const {
  if (writes_ && unanswered_.empty() && refusals_.empty()) {
    return Outcome::kCommit;
  }
  const bool refused = unanswered_.empty() ? !refusals_.empty()
                                           : knows_refusal() && absent_.empty();
  if (deadline_passed_ || refused) {
    return Outcome::kAbort;
  }
  return std::nullopt;
}

Verdict Ballot::abort(double timeout_s) const {
  Verdict verdict;
  verdict.refused.assign(refused_.begin(), refused_.end());
  for (const auto& [rank, text] : refusals_) {
    verdict.reason += verdict.reason.empty() ? "" : "; ";
    verdict.reason += "rank " + std::to_string(rank) + ": " + text;
  }
  if (!deadline_passed_) {
    return verdict;
  }
  // A rank that never received the plan is why others could not prepare.
  const auto& missing = absent_.empty() ? unanswered_ : absent_;
  verdict.missing.assign(missing.begin(), missing.end());
  if (!verdict.reason.empty()) {
    return verdict;
  }
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%.1f s", timeout_s);
  if (verdict.missing.empty()) {
    verdict.missing.push_back(writer_);
    verdict.reason = "rank " + std::to_string(writer_) +
                     " wrote the plan and no decision within " + seconds.data();
  } else {
    verdict.reason = "ranks [" + join_numbers(verdict.missing, ", ") +
                     "] did not acknowledge within " + seconds.data();
  }
  return verdict;
}

}  // namespace pipetransformer::autodp
