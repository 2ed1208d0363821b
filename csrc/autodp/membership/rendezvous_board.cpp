#include "autodp/membership/rendezvous_board.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "autodp/store/text_lines.h"
#include "core/plain_text.h"

namespace pipetransformer::autodp {

namespace {

constexpr std::string_view kStays = "stays\n";  // then the standing
constexpr size_t kLongestQuote = 80;

std::string list_key(int64_t generation) {
  return "roll/" + std::to_string(generation) + "/list";
}

}  // namespace

std::string answer_key(int64_t generation, int rank) {
  return "roll/" + std::to_string(generation) + "/" + std::to_string(rank);
}

std::string heartbeat_key(int rank) {
  return "hb/" + std::to_string(rank);
}

struct RendezvousBoard::Look {
  std::optional<std::string> list;
  std::map<int, std::optional<std::string>> answers;
  std::map<int, std::optional<std::string>> beats;
};

RendezvousBoard::RendezvousBoard(
    std::shared_ptr<StoreClient> client,
    std::shared_ptr<RunState> run,
    int rank,
    double heartbeat_timeout_s,
    std::string standing)
    : client_(std::move(client)),
      run_(std::move(run)),
      rank_(rank),
      next_(run_->generation()->number + 1),
      abort_key_(run_->generation()->key("abort")),
      answer_(std::string(kStays) + std::move(standing)),
      members_(run_->generation()->members),
      rules_(rank, members_) {
  const auto generation = run_->generation();
  const double now_s = steady_now_s();
  for (const int member : members_) {
    beats_.emplace(
        member,
        Heartbeat(
            LivenessTracker(heartbeat_timeout_s, heartbeat_timeout_s, now_s)));
  }
  // The account of a failure names a rank that has ended or is silent. A broken
  // connection names nobody.
  const auto failure = generation->latch->failure().value_or(Failure());
  abort_ = encode(failure);
  if (failure.rank >= 0 && failure.rank != rank) {
    rules_.on_gone(failure.rank);
  }
}

bool RendezvousBoard::step() {
  observe(look());
  if (const auto proposal = rules_.proposal()) {
    if (const auto list = try_close(*proposal)) {
      rules_.on_closed(*list);
    }
  }
  const auto& closed = rules_.closed();
  if (closed.has_value() && !rules_.fenced() && standings_.empty()) {
    read_standings(*closed);
  }
  return closed.has_value();
}

RendezvousBoard::Look RendezvousBoard::look() {
  auto seen = std::make_shared<Look>();
  client_->run_with(
      nullptr,
      [seen,
       next = next_,
       rank = rank_,
       silent = rules_.silent(),
       abort_key = abort_key_,
       abort = abort_,
       answer = answered_ ? std::string() : answer_](c10d::Store& store) {
        seen->list = read_key(store, list_key(next));
        if (seen->list.has_value()) {
          return;
        }
        if (!answer.empty()) {
          store.compareSet(abort_key, "", abort);
          store.compareSet(answer_key(next, rank), "", answer);
        }
        for (const int member : silent) {
          seen->answers[member] = read_key(store, answer_key(next, member));
          seen->beats[member] = read_key(store, heartbeat_key(member));
        }
      });
  answered_ = true;
  return std::move(*seen);
}

void RendezvousBoard::observe(const Look& seen) {
  if (seen.list.has_value()) {
    rules_.on_closed(read_list(*seen.list));
    return;
  }
  const double now_s = steady_now_s();
  for (const auto& [member, answer] : seen.answers) {
    if (answer.has_value()) {
      rules_.on_answer(member, answer->starts_with(kStays));
      continue;
    }
    if (!beats_.at(member).observe(seen.beats.at(member), now_s)) {
      rules_.on_gone(member);
    }
  }
}

std::optional<std::vector<int>>
RendezvousBoard::try_close(const std::vector<int>& members) {
  auto written = std::make_shared<std::string>();
  client_->run_with(
      nullptr,
      [written, next = next_, list = join_numbers(members, " ")](
          c10d::Store& store) {
        *written = store.compareSet(list_key(next), "", list);
      });
  return read_list(*written);
}

std::vector<int> RendezvousBoard::read_list(const std::string& text) const {
  std::vector<int> ranks;
  if (!parse_numbers(text, ranks, ' ') ||
      std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) !=
          ranks.end() ||
      !std::includes(
          members_.begin(), members_.end(), ranks.begin(), ranks.end())) {
    throw std::runtime_error(
        "roll: expected ascending members of the generation before, got '" +
        core::plain_text(text, kLongestQuote) + "'");
  }
  return ranks;
}

void RendezvousBoard::read_standings(const std::vector<int>& members) {
  auto found = std::make_shared<std::map<int, std::string>>();
  client_->run_with(
      nullptr, [found, next = next_, members](c10d::Store& store) {
        for (const int member : members) {
          auto answer = read_key(store, answer_key(next, member));
          if (answer.has_value() && answer->starts_with(kStays)) {
            (*found)[member] = answer->substr(kStays.size());
          }
        }
      });
  standings_ = std::move(*found);
}

}  // namespace pipetransformer::autodp
