// The value of plan/<e>: a plan, opaque here, under a header that says which
// run and which plan it follows. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pipetransformer::autodp {

struct PlanMessage {
  int64_t epoch = 0;
  std::string run;     // one line
  std::string parent;  // hash of the plan it follows, empty: of none
  int writer = 0;
  std::vector<int> participants;  // who must acknowledge
  std::string plan;
};

// Ends with a hash of everything before it.
std::string encode(const PlanMessage& message);

// nullopt for bytes that encode() did not write: torn, of another version, or
// without participants that are distinct ranks.
std::optional<PlanMessage> decode_plan(std::string_view bytes);

// The value of `head`: the latest announced epoch.
struct PlanHead {
  int64_t epoch = -1;  // -1: none was announced
  int64_t floor = 0;   // lowest epoch whose keys may still be there
  int writer = -1;
};

std::string encode(const PlanHead& head);

// An absent key gives the defaults. Throws std::runtime_error for bytes that
// encode() did not write.
PlanHead decode_head(const std::optional<std::string>& bytes);

// Names a message, 16 hexadecimal digits; the parent of the plan after it.
std::string plan_hash(std::string_view bytes);

// What makes `message` no plan for a rank of `run` that expects plan `epoch`
// after `parent` (nullopt: after any); empty: nothing.
std::string find_mismatch(
    const std::optional<PlanMessage>& message,
    int64_t epoch,
    const std::string& run,
    const std::optional<std::string>& parent);

}  // namespace pipetransformer::autodp
