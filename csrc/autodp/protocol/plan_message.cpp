#include "autodp/protocol/plan_message.h"

#include <array>
#include <cinttypes>
#include <cstdio>
#include <set>
#include <stdexcept>

#include "autodp/store/text_lines.h"
#include "core/hash.h"
#include "core/plain_text.h"

namespace pipetransformer::autodp {

namespace {

constexpr std::string_view kPlanVersion = "plan 1";
constexpr size_t kLongestPlanQuote = 80;

std::string mismatch(
    const std::string& what,
    const std::string& expected,
    const std::string& got) {
  return "plan message: expected " + what + " '" + expected + "', got '" +
         core::plain_text(got, kLongestPlanQuote) + "'";
}

bool are_distinct_ranks(const std::vector<int>& ranks) {
  const std::set<int> distinct(ranks.begin(), ranks.end());
  return !ranks.empty() && distinct.size() == ranks.size() &&
         *distinct.begin() >= 0;
}

}  // namespace

std::string plan_hash(std::string_view bytes) {
  std::array<char, 17> digits{};
  std::snprintf(
      digits.data(), digits.size(), "%016" PRIx64, core::hash_string(bytes));
  return digits.data();
}

std::string encode(const PlanMessage& message) {
  std::string text(kPlanVersion);
  text += "\n" + std::to_string(message.epoch) + "\n" + message.run + "\n" +
          message.parent + "\n" + std::to_string(message.writer) + "\n" +
          join_numbers(message.participants) + "\n" + message.plan;
  return text + "\n" + plan_hash(text);
}

std::optional<PlanMessage> decode_plan(std::string_view bytes) {
  const auto end = bytes.rfind('\n');
  if (end == std::string_view::npos ||
      bytes.substr(end + 1) != plan_hash(bytes.substr(0, end))) {
    return std::nullopt;
  }
  auto rest = bytes.substr(0, end);
  PlanMessage message;
  if (take_line(rest) != kPlanVersion ||
      !parse(take_line(rest), message.epoch)) {
    return std::nullopt;
  }
  message.run = take_line(rest);
  message.parent = take_line(rest);
  if (!parse(take_line(rest), message.writer) ||
      !parse_numbers(take_line(rest), message.participants) ||
      !are_distinct_ranks(message.participants)) {
    return std::nullopt;
  }
  message.plan = rest;
  return message;
}

std::string encode(const PlanHead& head) {
  return std::to_string(head.epoch) + "\n" + std::to_string(head.floor) + "\n" +
         std::to_string(head.writer);
}

PlanHead decode_head(const std::optional<std::string>& bytes) {
  PlanHead head;
  if (!bytes.has_value()) {
    return head;
  }
  std::string_view rest = *bytes;
  if (!parse(take_line(rest), head.epoch) ||
      !parse(take_line(rest), head.floor) || !parse(rest, head.writer) ||
      head.floor < 0 || head.floor > head.epoch || head.writer < 0) {
    throw std::runtime_error(
        "head: expected an epoch, one from 0 to it and a rank, got '" +
        core::plain_text(*bytes, kLongestPlanQuote) + "'");
  }
  return head;
}

std::string find_mismatch(
    const std::optional<PlanMessage>& message,
    int64_t epoch,
    const std::string& run,
    const std::optional<std::string>& parent) {
  if (!message.has_value()) {
    return "plan message: expected one of version '" +
           std::string(kPlanVersion) + "' with its own hash, got other bytes";
  }
  if (message->epoch != epoch) {
    return mismatch(
        "plan epoch", std::to_string(epoch), std::to_string(message->epoch));
  }
  if (message->run != run) {
    return mismatch("run", run, message->run);
  }
  if (parent.has_value() && message->parent != *parent) {
    return mismatch("the plan after", *parent, message->parent);
  }
  return "";
}

}  // namespace pipetransformer::autodp
