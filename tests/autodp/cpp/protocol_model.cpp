// Walks every reachable state of three ranks that change plans, and looks for
// planted bugs: see protocol_world.h.
//
// protocol_model                     the default scenarios and all mutations
// protocol_model NAME E C L R D      one scenario with E epochs, C crashes,
// late
//                                    writes (0 or 1), R refusals, D deadlines;
//                                    NAME: plain, sleeper, lead, writers
//
// Prints the number of states of each walk; returns 1 if anything is wrong.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "core/hash.h"
#include "protocol_world.h"

namespace {

using namespace model;

struct Result {
  size_t num_states = 0;
  size_t num_ends = 0;
  std::optional<Violation> violation;
};

struct KeyHash {
  size_t operator()(const std::pair<uint64_t, uint64_t>& key) const {
    return key.first;
  }
};

class Walk {
 public:
  Result run(const Scenario& scenario, Mutation mutation) {
    visit(World(scenario, mutation));
    while (!pending_.empty() && !result_.violation) {
      auto [world, id] = std::move(pending_.back());
      pending_.pop_back();
      expand(world, id);
    }
    if (!result_.violation) {
      check_progress();
    }
    result_.num_states = known_.size();
    return result_;
  }

 private:
  uint32_t visit(World&& world) {
    using pipetransformer::core::hash_string;
    const auto text = world.encode();
    const auto [found, is_new] = known_.emplace(
        std::pair(hash_string(text), hash_string(text, 1)), known_.size());
    const auto id = static_cast<uint32_t>(found->second);
    if (is_new) {
      before_.emplace_back();
      if (world.ended()) {
        world.check_end();
        ++result_.num_ends;
        ends_.push_back(id);
      } else if (world.out_of_time()) {
        ends_.push_back(id);
      }
      note(world);
      pending_.emplace_back(std::move(world), id);
    }
    return id;
  }

  void expand(const World& world, uint32_t id) {
    for (const auto action : world.actions()) {
      World next = world;
      next.perform(action);
      note(next);
      const auto next_id = visit(std::move(next));
      // Nobody's progress may depend on a death.
      if (next_id != id && action.kind != Action::Kind::kCrash &&
          action.kind != Action::Kind::kLastWrite) {
        before_[next_id].push_back(id);
      }
    }
  }

  void note(const World& world) {
    if (!result_.violation) {
      result_.violation = world.violation();
    }
  }

  // From every state an end can be reached, or the end of the scenario.
  void check_progress() {
    std::vector<bool> reached(known_.size());
    auto queue = ends_;
    for (const auto id : queue) {
      reached[id] = true;
    }
    size_t count = queue.size();
    while (!queue.empty()) {
      const auto id = queue.back();
      queue.pop_back();
      for (const auto earlier : before_[id]) {
        if (!reached[earlier]) {
          reached[earlier] = true;
          ++count;
          queue.push_back(earlier);
        }
      }
    }
    if (count < known_.size()) {
      result_.violation = Violation{
          Invariant::kProgress,
          std::to_string(known_.size() - count) + " states without an end"};
    }
  }

  Result result_;
  std::unordered_map<std::pair<uint64_t, uint64_t>, size_t, KeyHash> known_;
  std::vector<std::vector<uint32_t>> before_;
  std::vector<uint32_t> ends_;
  std::vector<std::pair<World, uint32_t>> pending_;
};

struct Planted {
  Mutation mutation;
  const char* what;
  Scenario scenario;
  Invariant finder;
};

// name, epochs, crashes, late writes, refusals, deadlines, sleeper, second
// lead, two writers
constexpr Scenario kFaults{"faults", 1, 1, false, 0, 3, false, false, false};
constexpr Scenario
    kRefusals{"refusals", 1, 0, false, 1, 1, false, false, false};
constexpr Scenario kRetries{"retries", 2, 0, false, 1, 0, false, false, false};
constexpr Scenario kSleeper{"sleeper", 5, 0, false, 0, 1, true, false, false};
constexpr Scenario kLate{"late writes", 4, 1, true, 0, 1, true, false, false};
constexpr Scenario kLead{"second lead", 2, 0, false, 0, 0, false, true, false};
constexpr Scenario
    kWriters{"two writers", 1, 0, false, 0, 3, false, false, true};

const Planted kPlanted[] = {
    {Mutation::kCommitWithoutAnswers,
     "silence is yes",
     kFaults,
     Invariant::kAllReady},
    {Mutation::kRefusalIsYes,
     "a refusal is yes",
     kRefusals,
     Invariant::kAllReady},
    {Mutation::kDecisionOverwrites,
     "decisions overwrite",
     kFaults,
     Invariant::kOneDecision},
    {Mutation::kBelievesItself,
     "a rank believes its proposal",
     kFaults,
     Invariant::kOneDecision},
    {Mutation::kAnyoneCommits,
     "anyone commits",
     kFaults,
     Invariant::kWriterCommits},
    {Mutation::kUsesOnAnswer,
     "use before the decision",
     kFaults,
     Invariant::kUseAfterCommit},
    {Mutation::kOldPlanStays,
     "old plan after COMMIT",
     kFaults,
     Invariant::kUseAfterCommit},
    {Mutation::kPlanTwice, "plans change", kFaults, Invariant::kPlanStays},
    {Mutation::kHeadOverwrites,
     "heads overwrite",
     kWriters,
     Invariant::kOneWriter},
    {Mutation::kHeadWithoutWriter,
     "heads without writer",
     kWriters,
     Invariant::kOneWriter},
    {Mutation::kRemovesRecent,
     "one epoch too many goes",
     kSleeper,
     Invariant::kKeysStay},
    {Mutation::kRemovesNothing, "nothing goes", kSleeper, Invariant::kKeysGo},
    {Mutation::kDecisionReturns,
     "a removed decision returns",
     kSleeper,
     Invariant::kOneDecision},
    {Mutation::kFencedGoesOn,
     "a fenced rank goes on",
     kSleeper,
     Invariant::kFencedIsSilent},
    {Mutation::kNoDeadline,
     "only the writer has a clock",
     kFaults,
     Invariant::kProgress},
    {Mutation::kNobodyCloses,
     "undecided epochs stay open",
     kLead,
     Invariant::kFencedIsPast},
    {Mutation::kAnyLineage,
     "any parent is accepted",
     kLead,
     Invariant::kLineage},
};

std::string on_one_line(std::string text) {
  for (char& c : text) {
    c = c == '\n' ? ' ' : c;
  }
  return text;
}

bool walk(const Scenario& scenario) {
  const auto result = Walk().run(scenario, Mutation::kNone);
  std::printf(
      "%s: %zu states, %zu ends",
      scenario.name,
      result.num_states,
      result.num_ends);
  if (result.violation) {
    std::printf(
        "; broken: %s: %s",
        name(result.violation->invariant),
        on_one_line(result.violation->text).c_str());
  }
  std::printf("\n");
  return !result.violation;
}

bool find(const Planted& planted) {
  const auto result = Walk().run(planted.scenario, planted.mutation);
  const bool found =
      result.violation && result.violation->invariant == planted.finder;
  std::printf(
      "%s: %s after %zu states: %s (%s)\n",
      planted.what,
      found ? "found" : "NOT FOUND",
      result.num_states,
      result.violation ? name(result.violation->invariant) : "nothing",
      result.violation ? on_one_line(result.violation->text).c_str() : "");
  return found;
}

Scenario from_arguments(char** arguments) {
  Scenario scenario{arguments[1], 1, 0, false, 0, 0, false, false, false};
  scenario.epochs = std::atoi(arguments[2]);
  scenario.crashes = std::atoi(arguments[3]);
  scenario.late_writes = std::atoi(arguments[4]) != 0;
  scenario.refusals = std::atoi(arguments[5]);
  scenario.deadlines = std::atoi(arguments[6]);
  scenario.sleeper = std::strcmp(arguments[1], "sleeper") == 0;
  scenario.second_lead = std::strcmp(arguments[1], "lead") == 0;
  scenario.two_writers = std::strcmp(arguments[1], "writers") == 0;
  return scenario;
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 7) {
    return walk(from_arguments(arguments)) ? 0 : 1;
  }
  bool good = true;
  for (const auto& scenario :
       {kFaults, kRefusals, kRetries, kSleeper, kLate, kLead, kWriters}) {
    good = walk(scenario) && good;
  }
  for (const auto& planted : kPlanted) {
    good = find(planted) && good;
  }
  return good ? 0 : 1;
}
