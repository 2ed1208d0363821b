// Feeds what others may have written to the torch-free C++ that reads it, under
// sanitizers: damaged messages of the store, changes of plan and rendezvous
// that meet them, and the numbers of profiles, clusters and plans at their
// limits.
//
//   feed_readers [SEED] [ROUNDS]
//
// Each ends in a value, or in the error that the reader's header names.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "autodp/failure/failure.h"
#include "autodp/membership/membership.h"
#include "autodp/protocol/decision.h"
#include "autodp/protocol/plan_message.h"
#include "autodp/protocol/transition.h"
#include "autodp/store/board.h"
#include "autodp/store/text_lines.h"
#include "planner/costs/step_model.h"
#include "planner/search/search.h"
#include "simulator/step.h"

namespace {

using namespace pipetransformer;

std::mt19937_64 rng;
int failures = 0;

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    ++failures;
  }
}

uint64_t below(uint64_t end) {
  return std::uniform_int_distribution<uint64_t>(0, end - 1)(rng);
}

template <typename Value, std::size_t size>
Value one_of(const std::array<Value, size>& values) {
  return values[below(size)];
}

// ---- messages

std::string damaged(std::string bytes) {
  constexpr std::array<std::string_view, 11> kParts{
      "\n",
      "\n\n\n",
      ",",
      "-1",
      "-9223372036854775808",
      "99999999999999999999",
      "1e999",
      "nan",
      "\x1b[2J",
      "\xff\xfe",
      "failure 1"};
  for (uint64_t left = 1 + below(4); left > 0; --left) {
    const auto at = below(bytes.size() + 1);
    switch (below(6)) {
      case 0:
        bytes.erase(at, 1 + below(16));
        break;
      case 1:
        bytes.insert(at, one_of(kParts));
        break;
      case 2:
        bytes.insert(at, bytes.substr(at, 1 + below(16)));
        break;
      case 3:
        bytes.resize(at);
        break;
      case 4:
        bytes.insert(at, 1 + below(100), static_cast<char>(below(256)));
        break;
      default:
        if (at < bytes.size()) {
          bytes[at] = static_cast<char>(below(256));
        }
    }
  }
  return bytes;
}

void feed_messages() {
  using namespace pipetransformer::autodp;
  const Failure failure{2, "heartbeat", 3, 10.0, "no heartbeat"};
  check(decode(encode(failure)).reason == failure.reason, "a whole failure");
  static_cast<void>(describe(decode(damaged(encode(failure)))));

  const Verdict verdict{Outcome::kAbort, {1, 2}, {3}, "rank 3: no room"};
  check(decode_verdict(encode(verdict)) == verdict, "a whole verdict");
  const auto read = decode_verdict(damaged(encode(verdict)));
  check(read.outcome == Outcome::kAbort, "no damage makes a commit");

  const Answer answer{"no room", true};
  check(decode_answer(encode(answer)) == answer, "a whole answer");
  static_cast<void>(decode_answer(damaged(encode(answer))));

  const PlanMessage message{4, "run", "0123", 1, {0, 1, 2}, "{\"plan\": 1}"};
  const auto bytes = encode(message);
  const auto other = damaged(bytes);
  check(decode_plan(bytes).has_value(), "a whole plan");
  check(!decode_plan(other).has_value() || other == bytes, "no damaged plan");
  static_cast<void>(find_mismatch(decode_plan(other), 4, "run", "0123"));

  const PlanHead head{7, 5, 1};
  check(decode_head(encode(head)).epoch == 7, "a whole head");
  try {
    static_cast<void>(decode_head(damaged(encode(head))));
  } catch (const std::runtime_error&) {
    return;  // as its header says
  }
}

void feed_list() {
  using namespace pipetransformer::autodp;
  std::vector<int> ranks;
  check(parse_numbers("0,1,3", ranks) && ranks.size() == 3, "a whole list");
  if (!parse_numbers(damaged("0,1,3"), ranks)) {
    return;
  }
  Rendezvous roll(1, {0, 1, 2, 3});
  roll.on_answer(ranks.empty() ? -1 : ranks.front(), below(2) == 0);
  roll.on_closed(ranks);
  const bool named = std::find(ranks.begin(), ranks.end(), 1) != ranks.end();
  check(named || roll.fenced(), "a rank that is not listed is fenced");
}

// ---- changes of plan

// A store to which somebody else writes, too.
class FoulBoard : public autodp::Board {
 public:
  explicit FoulBoard(autodp::PlanMessage plan) : plan_(std::move(plan)) {
    for (int left = 0; left < 8; ++left) {
      foul();
    }
  }

  std::optional<std::string> read(const std::string& key) override {
    foul_at_times();
    const auto found = keys_.find(key);
    return found == keys_.end() ? std::nullopt : std::optional(found->second);
  }
  bool exist(const std::vector<std::string>& keys) override {
    foul_at_times();
    return std::all_of(keys.begin(), keys.end(), [this](const auto& key) {
      return keys_.contains(key);
    });
  }
  void set(const std::string& key, const std::string& value) override {
    foul_at_times();
    keys_[key] = value;
  }
  std::string compare_set(
      const std::string& key,
      const std::string& expected,
      const std::string& desired) override {
    const auto held = read(key);
    if (held.value_or("") == expected && (held || expected.empty())) {
      keys_[key] = desired;
      return desired;
    }
    return held.value_or(expected);
  }
  void remove(const std::vector<std::string>& keys) override {
    check(keys.size() < 100, "few keys are removed at once");
    for (const auto& key : keys) {
      keys_.erase(key);
    }
  }

 private:
  void foul_at_times() {
    if (below(8) == 0) {
      foul();
    }
  }

  // Writes or removes a key, with a value that is whole, or damaged, or damaged
  // with the right hash.
  void foul() {
    using namespace pipetransformer::autodp;
    const auto epoch =
        "/" + std::to_string(plan_.epoch - static_cast<int64_t>(below(4)));
    const auto of_rank = epoch + "/" + std::to_string(below(3));
    const std::array<std::pair<std::string, std::string>, 5> choices{{
        {"head",
         encode(PlanHead{plan_.epoch - static_cast<int64_t>(below(3)), 1, 0})},
        {"plan" + epoch, encode(plan_)},
        {"decision" + epoch,
         below(2) == 0 ? kOpen
                       : encode(Verdict{Outcome::kAbort, {1}, {}, "no"})},
        {"ack" + of_rank,
         encode(Answer{below(2) == 0 ? "" : "no room", false})},
        {"here" + of_rank, "1"},
    }};
    auto [key, value] = one_of(choices);
    switch (below(5)) {
      case 0:
        keys_.erase(key);
        return;
      case 1:
        value = damaged(value);
        break;
      case 2:
        if (key.starts_with("plan")) {
          value = damaged(value.substr(0, value.rfind('\n')));
          value += "\n" + plan_hash(value);
        }
        break;
      default:
        break;
    }
    keys_[key] = value;
  }

  autodp::PlanMessage plan_;
  std::map<std::string, std::string> keys_;
};

// Steps until done, or for so long that every deadline has passed; false then.
bool finish(autodp::Transition& change, FoulBoard& board, double& now_s) {
  for (int steps = 0; steps < 2000; ++steps) {
    if (change.step(board, now_s) == autodp::Progress::kDone) {
      return true;
    }
    now_s += 0.01;
  }
  return false;
}

void feed_change() {
  using namespace pipetransformer::autodp;
  TransitionOptions options;
  options.rank = static_cast<int>(below(3));
  options.world_size = 3;
  options.epoch = 4;
  options.writer = options.rank == 0;
  options.participants = {0, 1, 2};
  options.run = "run";
  options.parent = "0123";
  options.timeout_s = 2;
  FoulBoard board(PlanMessage{4, "run", "0123", 0, {0, 1, 2}, "{}"});
  Transition change(options);
  double now_s = 0;
  const auto over = [&change] {
    return change.fenced() || change.verdict().has_value() ||
           !change.announce_error().empty();
  };
  try {
    if (options.writer) {
      change.announce("{}");
      check(finish(change, board, now_s), "an announcement ends");
    } else {
      change.receive();
      if (!finish(change, board, now_s)) {
        return;  // there was no plan; nobody has promised one
      }
    }
    if (!over()) {
      change.meet();
      check(finish(change, board, now_s), "a meeting ends");
    }
    if (!over()) {
      change.acknowledge(Answer{below(4) == 0 ? "no room" : "", false});
      check(finish(change, board, now_s), "an answer ends");
      change.decide();
      check(finish(change, board, now_s), "a decision comes");
    }
    check(over(), "a change of plan is over");
    const auto& verdict = change.verdict();
    check(
        !verdict || verdict->outcome == Outcome::kAbort || options.writer,
        "nobody commits but the writer");
  } catch (const std::runtime_error& error) {
    const std::string said = error.what();
    check(said.starts_with("head: expected"), "the head alone is an error");
  }
}

// ---- profiles, clusters, plans

int64_t number() {
  constexpr std::array<int64_t, 18> kNumbers{
      0,
      0,
      1,
      1,
      2,
      3,
      7,
      10,
      50,
      1000,
      1000000,
      int64_t{1} << 31,
      int64_t{1} << 40,
      int64_t{1} << 53,
      int64_t{1} << 61,
      int64_t{1} << 62,
      -1,
      100};
  return below(80) == 0 ? one_of(kNumbers) : kNumbers[2 + below(8)];
}

std::vector<int64_t> numbers(std::size_t count) {
  std::vector<int64_t> found;
  while (found.size() < count) {
    found.push_back(number());
  }
  return found;
}

planner::Profile a_profile() {
  planner::Profile profile;
  profile.microbatch_samples = {1};
  if (below(2) == 0) {
    profile.microbatch_samples.push_back(2 + static_cast<int64_t>(below(64)));
  }
  const auto sizes = profile.microbatch_samples.size();
  for (uint64_t left = 1 + below(5); left > 0; --left) {
    planner::LayerProfile layer;
    layer.forward_ns = numbers(sizes);
    layer.input_grad_ns = numbers(sizes);
    layer.weight_grad_ns = numbers(sizes);
    layer.forward_only_ns = numbers(sizes);
    layer.parameter_bytes = number();
    layer.activation_bytes_per_sample = number();
    layer.weight_grad_activation_bytes_per_sample = number();
    if (below(4) == 0) {
      layer.activation_bytes_per_microbatch = number();
      layer.shared_activation_bytes = number();
    }
    layer.boundary_bytes_per_sample = number();
    layer.trainable = below(4) != 0;
    layer.trainable_bytes = layer.trainable ? layer.parameter_bytes : 0;
    if (below(32) == 0) {
      layer.trainable_bytes = number();  // as a rule too many
    } else if (below(4) == 0) {
      layer.trainable_bytes /= 3;
    }
    profile.layers.push_back(std::move(layer));
  }
  if (below(4) == 0) {
    profile.tied_layers.emplace_back(below(3), below(4));
  }
  if (below(4) == 0) {
    profile.skips.emplace_back(below(3), below(4));
  }
  return profile;
}

planner::Cluster a_cluster() {
  planner::Cluster cluster;
  cluster.num_nodes = 1 + static_cast<int64_t>(below(3));
  cluster.devices_per_node = below(3) == 0 ? number() : 4;
  cluster.device_memory_bytes =
      below(3) == 0 ? number() : int64_t{1} << (10 + below(40));
  cluster.device_link_latency_ns = number();
  cluster.network_latency_ns = number();
  cluster.context_bytes = number();
  if (below(2) == 0) {
    cluster.device_link_bytes_per_s = number();
    cluster.network_bytes_per_s = number();
  }
  if (below(3) == 0) {
    cluster.cache = planner::CacheTiers{number(), number(), number(), number()};
  }
  return cluster;
}

planner::Simulated simulated(const planner::StepCosts& costs) {
  const auto result = simulator::simulate_step(costs, false);
  return {result.step_ns, result.pipelines.front().bubble_fraction};
}

planner::Request a_request(const planner::Profile& profile) {
  using namespace pipetransformer::planner;
  Request request;
  request.workload.global_batch =
      one_of(std::array<int64_t, 6>{1, 2, 16, 64, 1000, 100000});
  request.workload.boundary =
      static_cast<int64_t>(below(profile.layers.size() + 1));
  request.workload.checkpoint = one_of(std::array<Checkpoint, 3>{
      Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways});
  request.workload.copies =
      below(2) == 0 ? CopyModel::kOverlapped : CopyModel::kSerial;
  request.schedules = {
      ScheduleKind::kGPipe, ScheduleKind::kOneFOneB, ScheduleKind::kZbH1};
  request.cache_tiers = {
      CacheTier::kNone, CacheTier::kHost, CacheTier::kDisk, CacheTier::kDevice};
  if (below(3) == 0) {
    request.workload.num_samples = number();
  }
  if (below(3) == 0) {
    request.num_stages =
        below(8) == 0 ? number() : 1 + static_cast<int64_t>(below(4));
  }
  if (below(3) == 0) {
    request.num_microbatches =
        below(8) == 0 ? number() : 1 + static_cast<int64_t>(below(4));
  }
  if (below(3) == 0) {
    request.max_replicas =
        below(8) == 0 ? number() : 1 + static_cast<int64_t>(below(4));
  }
  request.min_replicas =
      below(8) == 0 ? number() : 1 + static_cast<int64_t>(below(3));
  request.all_replicas = below(2) == 0;
  return request;
}

bool feed_planner() {
  const auto profile = a_profile();
  const auto cluster = a_cluster();
  auto request = a_request(profile);
  try {
    planner::check(profile, cluster, request.workload.global_batch);
    const auto found = planner::search(profile, cluster, request, simulated);
    for (const auto& candidate : found.candidates) {
      check(
          candidate.simulated_ns >= candidate.lower_bound_ns,
          "no step stays below its bound");
      const auto costs = planner::step_costs(
          profile, cluster, request.workload, candidate.choice);
      const auto again = simulator::simulate_step(costs, true);
      check(again.step_ns == candidate.simulated_ns, "a plan simulated again");
    }
    return !found.candidates.empty();
  } catch (const std::invalid_argument& error) {
    const std::string said = error.what();
    check(said.find("expected") != std::string::npos, "an error says more");
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const auto rounds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1000;
  rng.seed(seed);
  uint64_t planned = 0;
  for (uint64_t round = 0; round < rounds; ++round) {
    for (int message = 0; message < 20; ++message) {
      feed_messages();
      feed_list();
      feed_change();
    }
    planned += feed_planner() ? 1 : 0;
  }
  std::printf(
      "%llu rounds, %llu planned, %d failures\n",
      static_cast<unsigned long long>(rounds),
      static_cast<unsigned long long>(planned),
      failures);
  return failures == 0 ? 0 : 1;
}
