#include "protocol_world.h"

#include <algorithm>

#include "autodp/store/text_lines.h"
#include "model_board.h"

namespace model {

using namespace pipetransformer::autodp;

namespace {

constexpr double kPastEveryDeadline = 1000;  // seconds; machines start at 0

const char* const kRun = "run";

}  // namespace

World::World(const Scenario& scenario, Mutation mutation)
    : scenario_(scenario), mutation_(mutation) {
  actors_[0].leads = true;
  actors_[1].leads = scenario.two_writers;
  if (scenario.sleeper) {
    actors_[1].stage = Stage::kEnded;
  }
}

std::vector<Action> World::actions() const {
  using Kind = Action::Kind;
  std::vector<Action> all;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto& actor = actors_.at(rank);
    if (actor.stage == Stage::kLastWrite) {
      all.push_back({Kind::kLastWrite, rank});
    }
    if (!actor.alive() || actor.stage == Stage::kEnded) {
      continue;
    }
    all.push_back({Kind::kStep, rank});
    if (actor.stage == Stage::kAnswer && refusals_ < scenario_.refusals) {
      all.push_back({Kind::kRefuse, rank});
    }
    const bool waits = actor.stage >= Stage::kMeet;
    const bool blind = mutation_ == Mutation::kNoDeadline && !actor.leads;
    if (waits && !actor.late && !blind && deadlines_ < scenario_.deadlines) {
      all.push_back({Kind::kDeadline, rank});
    }
    if (scenario_.second_lead && rank == 1 && !took_lead_ && actor.epoch <= 1) {
      all.push_back({Kind::kTakeLead, rank});
    }
    if (crashes_ < scenario_.crashes) {
      all.push_back({Kind::kCrash, rank});
    }
  }
  return all;
}

void World::perform(Action action) {
  auto& actor = actors_.at(action.rank);
  switch (action.kind) {
    case Action::Kind::kStep:
      return step(action.rank, false);
    case Action::Kind::kRefuse:
      ++refusals_;
      return step(action.rank, true);
    case Action::Kind::kDeadline:
      ++deadlines_;
      actor.late = true;
      return;
    case Action::Kind::kTakeLead:
      took_lead_ = true;
      actor.leads = true;
      actor.machine.reset();
      actor.epoch = 1;
      actor.left_out = {0};
      actor.stage = Stage::kBetween;
      return;
    case Action::Kind::kCrash: {
      ++crashes_;
      const bool writes = scenario_.late_writes && actor.machine &&
                          actor.stage != Stage::kAnswer;
      actor.stage = writes ? Stage::kLastWrite : Stage::kDead;
      return;
    }
    case Action::Kind::kLastWrite: {
      ModelBoard board(*this, action.rank);
      actor.machine->step(board, actor.late ? kPastEveryDeadline : 0);
      actor.stage = Stage::kDead;
      return;
    }
  }
}

void World::step(int rank, bool refuses) {
  auto& actor = actors_.at(rank);
  if (actor.stage == Stage::kBetween && !begin(rank)) {
    actor.stage = Stage::kEnded;
    return;
  }
  if (actor.stage == Stage::kAnswer) {
    actor.machine->acknowledge(Answer{refuses ? "no" : "", false});
    if (mutation_ == Mutation::kUsesOnAnswer && !refuses) {
      actor.plan = actor.epoch;
    }
  }
  ModelBoard board(*this, rank);
  const auto progress =
      actor.machine->step(board, actor.late ? kPastEveryDeadline : 0);
  if (progress == Progress::kDone) {
    finish(rank);
  }
  const auto decided = history_.decisions.find(actor.plan);
  const bool is_committed =
      actor.plan == 0 ||
      (decided != history_.decisions.end() &&
       decode_verdict(decided->second).outcome == Outcome::kCommit);
  if (!is_committed || actor.plan != actor.committed) {
    violate(
        Invariant::kUseAfterCommit,
        "rank " + std::to_string(rank) + " uses " + std::to_string(actor.plan));
  }
}

bool World::begin(int rank) {
  auto& actor = actors_.at(rank);
  if (actor.epoch == scenario_.epochs) {
    return false;
  }
  ++actor.epoch;
  actor.late = false;
  TransitionOptions options;
  options.rank = rank;
  options.world_size = kRanks;
  options.epoch = actor.epoch;
  options.writer = actor.leads;
  options.run = kRun;
  options.parent = actor.parent;
  if (mutation_ == Mutation::kAnyLineage && !actor.leads) {
    options.parent = std::nullopt;
  }
  options.timeout_s = 1;
  for (int other = 0; other < kRanks && actor.leads; ++other) {
    const bool asleep =
        scenario_.sleeper && (other == 1 || (other == 2 && actor.epoch > 1));
    if (!asleep && actor.left_out.count(other) == 0) {
      options.participants.push_back(other);
    }
  }
  actor.machine.emplace(options);
  if (actor.leads) {
    actor.stage = Stage::kAnnounce;
    actor.machine->announce("plan of " + std::to_string(rank));
  } else {
    actor.stage = Stage::kReceive;
    actor.machine->receive();
  }
  return true;
}

// Goes on to the next request, as Python's Transition and its caller do.
void World::finish(int rank) {
  auto& actor = actors_.at(rank);
  auto& machine = *actor.machine;
  if (machine.fenced()) {
    actor.fenced = true;
    const auto head = decode_head(keys_["head"]).epoch;
    if (head < actor.epoch + 3 && history_.writers.count(actor.epoch) > 0) {
      violate(
          Invariant::kFencedIsPast,
          "epoch " + std::to_string(actor.epoch) + " at head " +
              std::to_string(head));
    }
    if (mutation_ == Mutation::kFencedGoesOn) {
      ModelBoard(*this, rank)
          .set(
              "ack/" + std::to_string(actor.epoch) + "/" + std::to_string(rank),
              "ok");
    }
  }
  if (actor.fenced || !machine.announce_error().empty()) {
    actor.stage = Stage::kEnded;
    return;
  }
  if (machine.verdict().has_value()) {
    return learn(actor);
  }
  switch (actor.stage) {
    case Stage::kReceive:
      if (!machine.mismatch().empty()) {
        machine.acknowledge({machine.mismatch(), false});
        ModelBoard board(*this, rank);
        machine.step(board, 0);
        actor.stage = Stage::kEnded;  // it raises
        return;
      }
      [[fallthrough]];
    case Stage::kAnnounce:
      actor.stage = Stage::kMeet;
      return machine.meet();
    case Stage::kMeet:
      if (machine.met()) {
        actor.stage = Stage::kAnswer;
        return;
      }
      [[fallthrough]];
    default:
      actor.stage = Stage::kDecide;
      return machine.decide();
  }
}

void World::learn(Actor& actor) {
  const auto& verdict = *actor.machine->verdict();
  const auto decided = history_.decisions.find(actor.epoch);
  if (decided == history_.decisions.end() ||
      decided->second != pipetransformer::autodp::encode(verdict)) {
    violate(
        Invariant::kOneDecision,
        "of epoch " + std::to_string(actor.epoch) + " a rank believes " +
            pipetransformer::autodp::encode(verdict));
  }
  if (verdict.outcome == Outcome::kCommit) {
    const auto& message = *actor.machine->message();
    if (message.parent != actor.parent) {
      violate(
          Invariant::kLineage,
          "plan " + std::to_string(actor.epoch) + " follows '" +
              message.parent + "' where '" + actor.parent + "' was in force");
    }
    actor.committed = actor.epoch;
    if (mutation_ != Mutation::kOldPlanStays) {
      actor.plan = actor.epoch;
      actor.parent = actor.machine->hash();
    }
  } else if (actor.leads) {
    actor.left_out.insert(verdict.missing.begin(), verdict.missing.end());
    actor.left_out.insert(verdict.refused.begin(), verdict.refused.end());
    const auto self = static_cast<int>(&actor - actors_.data());
    actor.left_out.erase(self);
  }
  actor.machine.reset();
  actor.stage = Stage::kBetween;
}

bool World::ended() const {
  const bool hope =
      std::any_of(actors_.begin(), actors_.end(), [](const Actor& actor) {
        return actor.leads && actor.alive() && actor.stage != Stage::kEnded;
      });
  return std::all_of(
      actors_.begin(), actors_.end(), [hope](const Actor& actor) {
        return !actor.alive() || actor.stage == Stage::kEnded ||
               (!hope && actor.stage == Stage::kReceive);
      });
}

void World::check_end() {
  const auto found = keys_.find("head");
  if (found == keys_.end()) {
    return;
  }
  const auto head = decode_head(found->second).epoch;
  if (keys_.count("plan/" + std::to_string(head)) == 0) {
    return;  // its writer died before it removed what is old
  }
  const auto dead =
      std::count_if(actors_.begin(), actors_.end(), [](const Actor& actor) {
        return !actor.alive();
      });
  ptrdiff_t old_keys = 0;
  for (const auto& [key, value] : keys_) {
    const auto slash = key.find('/');
    int64_t epoch = head;
    if (slash != std::string::npos) {
      const auto end = key.find('/', slash + 1);
      parse(std::string_view(key).substr(slash + 1, end - slash - 1), epoch);
    }
    old_keys += epoch < head - 2 ? 1 : 0;
  }
  // A dead rank may have written late, and died before it removed that.
  if (old_keys > 2 * dead) {
    violate(Invariant::kKeysGo, std::to_string(old_keys) + " old keys");
  }
}

std::string World::encode() const {
  std::string text;
  for (const auto& [key, value] : keys_) {
    text += key + "=" + value + ";";
  }
  for (const auto& actor : actors_) {
    text += "|" + std::to_string(static_cast<int>(actor.stage)) + "," +
            std::to_string(actor.epoch) + "," + (actor.late ? "l" : "") +
            (actor.fenced ? "f" : "") + (actor.leads ? "w" : "") + "," +
            std::to_string(actor.plan) + "," + std::to_string(actor.committed) +
            "," + actor.parent + "," + join_numbers(actor.left_out) + ",";
    if (actor.machine && actor.stage != Stage::kDead) {
      text += actor.machine->describe();
    }
  }
  for (const auto& [epoch, value] : history_.decisions) {
    text += "|" + std::to_string(epoch) + value;
  }
  for (const auto& [epoch, rank] : history_.ready) {
    text += "|" + std::to_string(epoch) + "r" + std::to_string(rank);
  }
  return text + "|" + std::to_string(crashes_) + std::to_string(refusals_) +
         std::to_string(deadlines_) + (took_lead_ ? "t" : "");
}

void World::violate(Invariant invariant, const std::string& text) {
  if (!violation_.has_value()) {
    violation_ = Violation{invariant, text};
  }
}

const char* name(Invariant invariant) {
  switch (invariant) {
    case Invariant::kOneDecision:
      return "one decision";
    case Invariant::kAllReady:
      return "all ready";
    case Invariant::kWriterCommits:
      return "writer commits";
    case Invariant::kOneWriter:
      return "one writer";
    case Invariant::kPlanStays:
      return "plan stays";
    case Invariant::kUseAfterCommit:
      return "use after commit";
    case Invariant::kKeysStay:
      return "keys stay";
    case Invariant::kKeysGo:
      return "keys go";
    case Invariant::kFencedIsSilent:
      return "fenced is silent";
    case Invariant::kFencedIsPast:
      return "fenced is past";
    case Invariant::kLineage:
      return "lineage";
    case Invariant::kProgress:
      return "progress";
  }
  return "?";
}

}  // namespace model
