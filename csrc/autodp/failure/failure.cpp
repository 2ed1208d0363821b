#include "autodp/failure/failure.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <utility>

#include "autodp/store/text_lines.h"
#include "core/plain_text.h"

namespace pipetransformer::autodp {

namespace {

constexpr std::string_view kFailureVersion = "failure 1";
constexpr size_t kLongestPhase = 64;

// As `parse` reads it: `to_string` goes by the process's locale, which may have
// a decimal comma.
std::string to_text(double value) {
  std::array<char, 64> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

}  // namespace

double steady_now_s() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

std::string one_line(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\n\v\f\r";
  std::string line;
  size_t end = 0;
  while (true) {
    const auto begin = text.find_first_not_of(kBlanks, end);
    if (begin == std::string_view::npos) {
      return line;
    }
    end = std::min(text.find_first_of(kBlanks, begin), text.size());
    line += line.empty() ? "" : " ";
    line += text.substr(begin, end - begin);
  }
}

std::string describe(const Failure& failure) {
  std::string text = "peer failure: ";
  text += failure.rank >= 0 ? "rank " + std::to_string(failure.rank)
                            : std::string("rank unknown");
  text += ", phase '" + failure.phase + "'";
  if (failure.epoch >= 0) {
    text += ", plan epoch " + std::to_string(failure.epoch);
  }
  if (failure.deadline_s >= 0) {
    std::array<char, 32> number{};
    std::snprintf(number.data(), number.size(), "%.1f", failure.deadline_s);
    text += std::string(", deadline ") + number.data() + " s";
  }
  return text + ": " + one_line(failure.reason);
}

std::string encode(const Failure& failure) {
  return std::string(kFailureVersion) + "\n" + std::to_string(failure.rank) +
         "\n" + std::to_string(failure.epoch) + "\n" +
         to_text(failure.deadline_s) + "\n" + one_line(failure.phase) + "\n" +
         one_line(failure.reason);
}

Failure decode(std::string_view bytes) {
  auto rest = bytes;
  Failure failure;
  if (take_line(rest) == kFailureVersion &&
      parse(take_line(rest), failure.rank) &&
      parse(take_line(rest), failure.epoch) &&
      parse(take_line(rest), failure.deadline_s)) {
    failure.phase = core::plain_text(take_line(rest), kLongestPhase);
    failure.reason = core::plain_text(rest);
    return failure;
  }
  failure = Failure();
  failure.phase = "abort";
  failure.reason = core::plain_text(bytes);
  return failure;
}

void FailureLatch::set_epoch(int64_t epoch) {
  const std::lock_guard lock(mutex_);
  epoch_ = epoch;
}

bool FailureLatch::fail(Failure failure) {
  std::map<uint64_t, Callback> callbacks;
  Failure latched;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.has_value()) {
      return false;
    }
    if (failure.epoch < 0) {
      failure.epoch = epoch_;
    }
    failure_ = std::move(failure);
    failed_s_ = steady_now_s();
    latched = *failure_;
    callbacks.swap(callbacks_);
  }
  for (auto& [subscription, callback] : callbacks) {
    callback(latched);
  }
  return true;
}

void FailureLatch::suspect(Failure failure, double now_s) {
  {
    const std::lock_guard lock(mutex_);
    if (confirms_) {
      if (!symptom_.has_value()) {
        symptom_ = std::move(failure);
        symptom_s_ = now_s;
      }
      return;
    }
  }
  fail(std::move(failure));
}

void FailureLatch::confirm(double at_s, double grace_s) {
  std::optional<Failure> due;
  {
    const std::lock_guard lock(mutex_);
    if (!symptom_.has_value() || at_s - symptom_s_ < grace_s) {
      return;
    }
    due = symptom_;
  }
  fail(std::move(*due));
}

void FailureLatch::note_told() {
  {
    const std::lock_guard lock(mutex_);
    told_ = true;
  }
  told_changed_.notify_all();
}

void FailureLatch::wait_told(double limit_s) const {
  std::unique_lock lock(mutex_);
  if (!failure_.has_value()) {
    return;
  }
  const std::chrono::duration<double> left(
      failed_s_ + limit_s - steady_now_s());
  told_changed_.wait_for(lock, left, [this] { return told_; });
}

void FailureLatch::confirm_directly() {
  std::optional<Failure> due;
  {
    const std::lock_guard lock(mutex_);
    confirms_ = false;
    due = symptom_;
  }
  if (due.has_value()) {
    fail(std::move(*due));
  }
}

bool FailureLatch::failed() const {
  const std::lock_guard lock(mutex_);
  return failure_.has_value();
}

std::optional<Failure> FailureLatch::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void FailureLatch::check() const {
  if (const auto latched = failure()) {
    throw PeerFailureError(*latched);
  }
}

uint64_t FailureLatch::subscribe(Callback callback) {
  Failure latched;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.has_value()) {
      const auto subscription = next_subscription_++;
      callbacks_.emplace(subscription, std::move(callback));
      return subscription;
    }
    latched = *failure_;
  }
  callback(latched);
  return 0;
}

void FailureLatch::unsubscribe(uint64_t subscription) {
  Callback dropped;  // outlives the lock: destroying it may cost much
  const std::lock_guard lock(mutex_);
  const auto found = callbacks_.find(subscription);
  if (found != callbacks_.end()) {
    dropped.swap(found->second);
    callbacks_.erase(found);
  }
}

}  // namespace pipetransformer::autodp
