// Decides from a counter that a peer keeps writing whether the peer is alive.
//
// Torch-free, not thread-safe, pure: the caller supplies the time in seconds of
// any steady clock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "autodp/store/text_lines.h"

namespace pipetransformer::autodp {

class LivenessTracker {
 public:
  // A peer is dead after `timeout_s` without a change of its counter; before
  // its first beat it gets `start_timeout_s`: processes start at their own
  // pace.
  LivenessTracker(double timeout_s, double start_timeout_s, double now_s)
      : timeout_s_(timeout_s),
        start_timeout_s_(start_timeout_s),
        seen_s_(now_s) {}

  // Reports what the peer's counter holds now (nullopt: not written yet).
  // Returns false once the peer must be considered dead.
  //
  // A long gap between two observations means that *we* did not run (stopped,
  // suspended): a third of the timeout of it counts as silence, or every rank
  // of a job that was paused as a whole would call its neighbour dead. It never
  // counts as nothing, or an observer that is always late would be blind.
  bool observe(std::optional<int64_t> counter, double now_s) {
    silence_s_ += std::min(now_s - seen_s_, timeout_s_ / 3);
    if (counter != counter_) {
      silence_s_ = 0;
    }
    counter_ = counter;
    seen_s_ = now_s;
    return silence_s_ <= (counter ? timeout_s_ : start_timeout_s_);
  }

 private:
  double timeout_s_;
  double start_timeout_s_;
  std::optional<int64_t> counter_;
  double seen_s_;
  double silence_s_ = 0;
};

// The same of a counter that the store holds as text, and that only rises: what
// is not above the highest one seen, is no number, or is not there any more is
// no beat. So an old one that somebody puts back is no sign of life, and takes
// away none.
class Heartbeat {
 public:
  explicit Heartbeat(const LivenessTracker& tracker) : tracker_(tracker) {}

  bool observe(const std::optional<std::string>& text, double now_s) {
    int64_t counter = 0;
    if (text.has_value() && parse(*text, counter)) {
      highest_ = std::max(highest_.value_or(counter), counter);
    }
    return tracker_.observe(highest_, now_s);
  }

 private:
  LivenessTracker tracker_;
  std::optional<int64_t> highest_;
};

}  // namespace pipetransformer::autodp
