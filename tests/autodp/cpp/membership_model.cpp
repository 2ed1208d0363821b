// Walks every interleaving of a rendezvous of three ranks over the real rules
// (autodp/membership/membership.h): ranks that answer late or never, leave or
// crash at any point, and suspicions that come at any look, wrong ones too.
// Prints "<states> <broken invariant or ok>" and returns 0; with a number from
// 1 on as its argument the rules are spoilt on purpose.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "autodp/membership/membership.h"

namespace {

using pipetransformer::autodp::Rendezvous;

constexpr int kRanks = 3;

enum Bug {
  kNone,
  kListOverwritten,     // closes by set, not by compare_set
  kSilentInList,        // proposes every member that is not known to be gone
  kLeaverStays,         // takes a leaving rank's answer for a standing
  kFencedGoesOn,        // does not notice that it is not in the list
  kAnswerWithdrawn,     // a leaving rank overwrites the answer it gave
  kWaitsForAll,         // waits for dead members, deadline or not
  kProposesUnanswered,  // and only then writes its answer
};

Bug bug = kNone;

enum class Phase { kRuns, kDone, kFenced, kEnded };

struct Rank {
  explicit Rank(int rank) : rules(rank, {0, 1, 2}) {}

  Rendezvous rules;
  Phase phase = Phase::kRuns;
  int next = 0;       // 0: looks at the list, 1: at the answers, 2: proposes
  std::string input;  // everything `rules` was told, in order of kind
};

struct State {
  std::vector<Rank> ranks;
  std::array<char, kRanks> answers{};  // 0: none, 's': stays, 'l': leaves
  std::optional<std::vector<int>> list;
};

std::string text(const std::optional<std::vector<int>>& list) {
  std::string out = list.has_value() ? "=" : "-";
  for (const int rank : list.value_or(std::vector<int>())) {
    out += std::to_string(rank);
  }
  return out;
}

std::string key(const State& state) {
  std::string out = text(state.list);
  for (int i = 0; i < kRanks; ++i) {
    const auto& rank = state.ranks[static_cast<size_t>(i)];
    out += '|';
    out += std::to_string(static_cast<int>(rank.phase));
    out += std::to_string(rank.next);
    out += state.answers[static_cast<size_t>(i)];
    for (const int other : rank.rules.silent()) {
      out += std::to_string(other);
    }
    // What silent() does not tell: who stays, who is gone, the deadline.
    std::set<std::string> told;
    for (size_t at = 0; at + 1 < rank.input.size(); at += 2) {
      told.insert(rank.input.substr(at, 2));
    }
    for (const auto& input : told) {
      out += ',' + input;
    }
    out += text(rank.rules.closed());
  }
  return out;
}

std::optional<std::vector<int>> proposal(const State& state, int self) {
  const auto& rank = state.ranks[static_cast<size_t>(self)];
  auto list = rank.rules.proposal();
  if (bug == kWaitsForAll && !rank.rules.silent().empty()) {
    return std::nullopt;
  }
  if (bug == kSilentInList && list.has_value()) {
    list = std::vector<int>{0, 1, 2};
  }
  return list;
}

void learn(State& state, int self, const std::vector<int>& list) {
  auto& rank = state.ranks[static_cast<size_t>(self)];
  rank.rules.on_closed(list);
  const bool fenced = rank.rules.fenced() && bug != kFencedGoesOn;
  rank.phase = fenced ? Phase::kFenced : Phase::kDone;
}

void look_at_answers(State& state, int self, int suspected) {
  auto& rank = state.ranks[static_cast<size_t>(self)];
  auto& own = state.answers[static_cast<size_t>(self)];
  if (own == 0 && bug != kProposesUnanswered) {
    own = 's';
  }
  rank.rules.on_answer(self, true);
  for (const int other : rank.rules.silent()) {
    const char answer = state.answers[static_cast<size_t>(other)];
    if (answer != 0) {
      const bool stays = answer == 's' || bug == kLeaverStays;
      rank.rules.on_answer(other, stays);
      rank.input += std::to_string(other) + (stays ? "s" : "l");
    } else if (other == suspected) {
      rank.rules.on_gone(other);
      rank.input += "g" + std::to_string(other);
    }
  }
}

// The next operation of a running rank on the board. Answers stay once written,
// so reading them one by one shows nothing that reading them at once does not.
void step(State& state, int self, int suspected) {
  auto& rank = state.ranks[static_cast<size_t>(self)];
  if (rank.next == 0) {
    rank.next = 1;
    if (state.list.has_value()) {
      learn(state, self, *state.list);
    }
    return;
  }
  if (rank.next == 2) {
    rank.next = 0;
    if (const auto list = proposal(state, self)) {
      if (!state.list.has_value() || bug == kListOverwritten) {
        state.list = list;
      }
      learn(state, self, *state.list);
    }
    return;
  }
  look_at_answers(state, self, suspected);
  ++rank.next;
}

// A rank that ends by its own will, before or during the rendezvous.
void leave(State& state, int self) {
  auto& rank = state.ranks[static_cast<size_t>(self)];
  auto& answer = state.answers[static_cast<size_t>(self)];
  if (answer == 0 || bug == kAnswerWithdrawn) {
    answer = 'l';
  }
  rank.phase = Phase::kEnded;
}

const char* broken(const State& state) {
  std::optional<std::vector<int>> first;
  for (int i = 0; i < kRanks; ++i) {
    const auto& rank = state.ranks[static_cast<size_t>(i)];
    const auto& closed = rank.rules.closed();
    if (rank.phase == Phase::kDone) {
      if (first.has_value() && *first != *closed) {
        return "one list";
      }
      first = closed;
      if (std::set<int>(closed->begin(), closed->end()).count(i) == 0) {
        return "fenced ranks end";
      }
    }
  }
  for (const int member : state.list.value_or(std::vector<int>())) {
    if (state.answers[static_cast<size_t>(member)] != 's') {
      return "members have a standing";
    }
  }
  return nullptr;
}

// Whether `self`, alone in the world and past its deadline, comes to an end.
bool ends_alone(State state, int self) {
  auto& rank = state.ranks[static_cast<size_t>(self)];
  rank.rules.on_deadline();
  for (int i = 0; i < 6; ++i) {
    if (rank.phase != Phase::kRuns) {
      return true;
    }
    step(state, self, -1);
  }
  return false;
}

std::vector<State> successors(const State& state) {
  std::vector<State> out;
  for (int i = 0; i < kRanks; ++i) {
    const auto at = static_cast<size_t>(i);
    if (state.ranks[at].phase != Phase::kRuns) {
      continue;
    }
    for (int suspected = -1; suspected < kRanks; ++suspected) {
      step(out.emplace_back(state), i, suspected);
    }
    out.emplace_back(state).ranks[at].phase = Phase::kEnded;  // a crash
    leave(out.emplace_back(state), i);
  }
  return out;
}

State start() {
  State state;
  for (int i = 0; i < kRanks; ++i) {
    state.ranks.emplace_back(i);
  }
  return state;
}

}  // namespace

int main(int argc, char** argv) {
  bug = static_cast<Bug>(argc > 1 ? std::atoi(argv[1]) : 0);
  std::unordered_set<std::string> seen;
  std::deque<State> todo{start()};
  seen.insert(key(todo.front()));
  const char* verdict = nullptr;
  while (!todo.empty() && verdict == nullptr) {
    const State state = std::move(todo.front());
    todo.pop_front();
    verdict = broken(state);
    for (int i = 0; i < kRanks && verdict == nullptr; ++i) {
      if (state.ranks[static_cast<size_t>(i)].phase == Phase::kRuns &&
          !ends_alone(state, i)) {
        verdict = "nobody waits for the dead";
      }
    }
    for (auto& next : successors(state)) {
      if (seen.insert(key(next)).second) {
        todo.push_back(std::move(next));
      }
    }
  }
  std::printf("%zu %s\n", seen.size(), verdict == nullptr ? "ok" : verdict);
  return 0;
}
