// Tests of the liveness tracker, which needs neither torch nor time. Prints
// what failed and returns 1, or returns 0.
#include "autodp/failure/liveness.h"

#include <cstdio>
#include <string>
#include <vector>

namespace {

using pipetransformer::autodp::Heartbeat;
using pipetransformer::autodp::LivenessTracker;

constexpr double kTimeout = 3;  // of a peer that beats every second
constexpr double kStart = 30;
int failures = 0;

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    ++failures;
  }
}

// How many looks, `gap_s` apart, at a counter that stays: until it is dead.
int looks_until_dead(LivenessTracker& peer, double now_s, double gap_s) {
  for (int look = 1; look < 1000; ++look) {
    if (!peer.observe(7, now_s + look * gap_s)) {
      return look;
    }
  }
  return -1;
}

void test_silent_peer_dies_after_the_timeout() {
  LivenessTracker peer(kTimeout, kStart, 0);
  check(peer.observe(7, 20), "its first beat may come late");
  check(looks_until_dead(peer, 20, 0.5) == 7, "3.5 s are above 3 s");
}

void test_late_observer_is_not_blind() {
  for (const double gap_s : {1.1, 1.6, 2.9, 3.1, 100.0}) {
    LivenessTracker peer(kTimeout, kStart, 0);
    peer.observe(7, 0);
    check(looks_until_dead(peer, 0, gap_s) == 4, "four late looks are enough");
  }
}

void test_paused_job_continues() {
  for (const double pause_s : {1.4, 1.6, 2.9, 3.1, 1000.0}) {
    LivenessTracker peer(kTimeout, kStart, 0);
    double now_s = 0;
    for (int beat = 0; beat < 20; ++beat) {
      // Everybody stops for a while just before the peer would have beaten.
      check(peer.observe(beat, now_s), "a beat");
      check(peer.observe(beat, now_s + 0.9), "just before the next one");
      now_s += 0.9 + pause_s;
      check(peer.observe(beat, now_s), "we were faster than the peer");
    }
  }
}

void test_peer_that_never_starts_dies_after_the_start_timeout() {
  LivenessTracker peer(kTimeout, kStart, 0);
  for (int now_s = 1; now_s <= 30; ++now_s) {
    check(peer.observe(std::nullopt, now_s), "within the start timeout");
  }
  check(!peer.observe(std::nullopt, 31), "after the start timeout");
}

// A peer that beat up to 9 and then died: how many looks, half a second apart,
// until that is seen, where others make `texts` in turn of its key.
int looks_until_missed(
    const std::vector<std::optional<std::string>>& texts) {
  Heartbeat peer(LivenessTracker(kTimeout, kStart, 0));
  peer.observe("8", 0);
  peer.observe("9", 0);
  for (int look = 1; look < 1000; ++look) {
    const auto& text = texts.at(static_cast<size_t>(look) % texts.size());
    if (!peer.observe(text, look * 0.5)) {
      return look;
    }
  }
  return -1;
}

void test_only_a_beat_above_all_before_is_a_sign_of_life() {
  check(looks_until_missed({"9"}) == 7, "it beats no more");
  check(looks_until_missed({"8", "9"}) == 7, "an old beat is put back");
  check(looks_until_missed({"9", std::nullopt}) == 7, "its key is removed");
  check(looks_until_missed({std::nullopt}) == 7, "and stays away");
  check(looks_until_missed({"?", "", "1e9", "9"}) == 7, "no numbers");
}

void test_old_beats_between_new_ones_end_nothing() {
  Heartbeat peer(LivenessTracker(kTimeout, kStart, 0));
  double now_s = 0;
  for (int beat = 0; beat < 50; ++beat) {
    now_s += 1;
    check(peer.observe(std::to_string(beat), now_s), "a beat");
    check(peer.observe("0", now_s + 0.5), "the first one again");
  }
}

void test_who_has_not_beaten_yet_may_take_its_time() {
  Heartbeat peer(LivenessTracker(kTimeout, kStart, 0));
  for (int now_s = 1; now_s <= 30; ++now_s) {
    check(peer.observe(std::nullopt, now_s), "within the start timeout");
  }
  check(!peer.observe("none", 31), "after the start timeout");
}

}  // namespace

int main() {
  test_silent_peer_dies_after_the_timeout();
  test_late_observer_is_not_blind();
  test_paused_job_continues();
  test_peer_that_never_starts_dies_after_the_start_timeout();
  test_only_a_beat_above_all_before_is_a_sign_of_life();
  test_old_beats_between_new_ones_end_nothing();
  test_who_has_not_beaten_yet_may_take_its_time();
  return failures == 0 ? 0 : 1;
}
