// Decides from a counter that a peer keeps writing whether the peer is alive.
//
// Torch-free, not thread-safe, pure: the caller supplies the time in seconds of
// any steady clock.
#pragma once

#include <cstdint>
#include <optional>

namespace pipetransformer::autodp {

class LivenessTracker {
 public:
  // A peer is dead after `timeout_s` without a change of its counter; before
  // its first beat it gets `start_timeout_s`: processes start at their own
  // pace.
  LivenessTracker(double timeout_s, double start_timeout_s, double now_s)
      : timeout_s_(timeout_s),
        start_timeout_s_(start_timeout_s),
        changed_s_(now_s),
        seen_s_(now_s) {}

  // Reports what the peer's counter holds now (nullopt: not written yet).
  // Returns false once the peer must be considered dead.
  //
  // A gap between two observations means that *we* did not run (stopped,
  // suspended); the peer gets a fresh timeout then, or every rank of a job that
  // was paused as a whole would call its neighbour dead.
  bool observe(std::optional<int64_t> counter, double now_s) {
    const bool we_were_away = now_s - seen_s_ > timeout_s_ / 2;
    if (counter != counter_ || we_were_away) {
      changed_s_ = now_s;
    }
    counter_ = counter;
    seen_s_ = now_s;
    const double allowed_s = counter ? timeout_s_ : start_timeout_s_;
    return now_s - changed_s_ <= allowed_s;
  }

 private:
  double timeout_s_;
  double start_timeout_s_;
  std::optional<int64_t> counter_;
  double changed_s_;
  double seen_s_;
};

}  // namespace pipetransformer::autodp
