#include "model_board.h"

#include "autodp/store/text_lines.h"

namespace model {

using namespace pipetransformer::autodp;

namespace {

// "plan/3", "ack/3/1": kind and epoch; "head" has epoch -1.
std::pair<std::string, int64_t> parts(const std::string& key) {
  const auto slash = key.find('/');
  if (slash == std::string::npos) {
    return {key, -1};
  }
  const auto end = key.find('/', slash + 1);
  int64_t epoch = -1;
  parse(std::string_view(key).substr(slash + 1, end - slash - 1), epoch);
  return {key.substr(0, slash), epoch};
}

}  // namespace

int64_t ModelBoard::head() const {
  const auto found = world_.keys_.find("head");
  return found == world_.keys_.end() ? -1 : decode_head(found->second).epoch;
}

std::optional<std::string> ModelBoard::read(const std::string& key) {
  const auto kind = parts(key).first;
  if (kind == "ack" && is(Mutation::kCommitWithoutAnswers)) {
    return "ok";
  }
  const auto found = world_.keys_.find(key);
  if (found == world_.keys_.end()) {
    return std::nullopt;
  }
  if (kind == "ack" && is(Mutation::kRefusalIsYes)) {
    return "ok";
  }
  return found->second;
}

bool ModelBoard::exist(const std::vector<std::string>& keys) {
  for (const auto& key : keys) {
    const bool pretended =
        is(Mutation::kCommitWithoutAnswers) && parts(key).first == "ack";
    if (!pretended && world_.keys_.count(key) == 0) {
      return false;
    }
  }
  return true;
}

void ModelBoard::set(const std::string& key, const std::string& value) {
  write(key, value);
  if (is(Mutation::kPlanTwice) && parts(key).first == "plan") {
    write(key, value + " again");
  }
}

std::string ModelBoard::compare_set(
    const std::string& key,
    const std::string& expected,
    const std::string& desired) {
  const auto [kind, epoch] = parts(key);
  std::string proposed = desired;
  if (kind == "decision" && desired != kOpen) {
    const bool closes = epoch != world_.actors_.at(rank_).epoch;
    if (closes && is(Mutation::kNobodyCloses)) {
      return "closed";
    }
    if (!closes && is(Mutation::kAnyoneCommits) &&
        world_.history_.writers[epoch] != rank_) {
      proposed = encode(Verdict{Outcome::kCommit, {}, {}, ""});
    }
  }
  if (kind == "head" && is(Mutation::kHeadWithoutWriter)) {
    // All that is compared is the epoch: the value found is taken as one's own.
    const auto found = world_.keys_.find(key);
    if (found != world_.keys_.end() &&
        decode_head(found->second).epoch == decode_head(desired).epoch) {
      check_head(desired);
      return desired;
    }
  }
  const bool overwrites = (kind == "decision" && desired != kOpen &&
                           is(Mutation::kDecisionOverwrites)) ||
                          (kind == "head" && is(Mutation::kHeadOverwrites));
  const auto found = world_.keys_.find(key);
  const bool there = found != world_.keys_.end();
  const bool returns =
      !there && expected == kOpen && is(Mutation::kDecisionReturns);
  if (overwrites || returns ||
      (there ? found->second == expected : expected.empty())) {
    write(key, proposed);
    return proposed;
  }
  if (kind == "decision" && desired != kOpen && is(Mutation::kBelievesItself)) {
    return proposed;
  }
  return there ? found->second : expected;
}

void ModelBoard::remove(const std::vector<std::string>& keys) {
  if (is(Mutation::kRemovesNothing)) {
    return;
  }
  const auto erase = [this](const std::string& key) {
    const auto epoch = parts(key).second;
    if (world_.keys_.erase(key) > 0 && head() < epoch + 3) {
      world_.violate(
          Invariant::kKeysStay,
          key + " removed at head " + std::to_string(head()));
    }
  };
  for (const auto& key : keys) {
    erase(key);
    if (is(Mutation::kRemovesRecent)) {
      const auto [kind, epoch] = parts(key);
      erase(kind + "/" + std::to_string(epoch + 1));
    }
  }
}

void ModelBoard::write(const std::string& key, const std::string& value) {
  const auto& actor = world_.actors_.at(rank_);
  if (actor.fenced) {
    world_.violate(Invariant::kFencedIsSilent, "it wrote " + key);
  }
  const auto [kind, epoch] = parts(key);
  if (kind == "head") {
    check_head(value);
  } else if (kind == "plan") {
    const auto before = world_.history_.plans.emplace(epoch, value).first;
    if (before->second != value || world_.history_.writers[epoch] != rank_) {
      world_.violate(Invariant::kPlanStays, key + " written twice");
    }
  } else if (kind == "ack") {
    if (value == "ok") {
      world_.history_.ready.emplace(epoch, rank_);
    }
  } else if (kind == "decision" && value != kOpen) {
    check_decision(epoch, value);
  }
  world_.keys_[key] = value;
}

void ModelBoard::check_head(const std::string& value) {
  const auto now = decode_head(value);
  const auto claim =
      world_.history_.writers.emplace(now.epoch, now.writer).first;
  if (now.epoch < head() || claim->second != now.writer) {
    world_.violate(Invariant::kOneWriter, "head " + value);
  }
}

void ModelBoard::check_decision(int64_t epoch, const std::string& value) {
  auto& history = world_.history_;
  const auto before = history.decisions.emplace(epoch, value).first;
  const bool is_late_close = head() >= epoch + 3;  // removed by who wrote it
  if (before->second != value && !is_late_close) {
    world_.violate(
        Invariant::kOneDecision,
        std::to_string(epoch) + ": " + before->second + ", then " + value);
  }
  if (decode_verdict(value).outcome != Outcome::kCommit) {
    return;
  }
  if (history.writers[epoch] != rank_) {
    world_.violate(Invariant::kWriterCommits, "rank " + std::to_string(rank_));
  }
  const auto message = decode_plan(history.plans[epoch]);
  for (const int rank : message.value_or(PlanMessage()).participants) {
    if (history.ready.count({epoch, rank}) == 0) {
      world_.violate(Invariant::kAllReady, "not rank " + std::to_string(rank));
    }
  }
}

}  // namespace model
