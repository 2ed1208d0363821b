// The one failure of a run: what happened, and a latch that every wait and
// every pending collective listens to.
//
// Torch-free. FailureLatch is thread-safe; the first failure wins and stays.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace pipetransformer::autodp {

// What ended the run. Unknown fields keep their defaults.
struct Failure {
  int rank = -1;           // rank held responsible, -1: unknown
  std::string phase;       // what was going on, e.g. "heartbeat", "all_reduce"
  int64_t epoch = -1;      // plan epoch, -1: before the first plan
  double deadline_s = -1;  // the deadline that passed, -1: none did
  std::string reason;      // one sentence for people
};

// Seconds of the steady clock, for `suspect` and `confirm`.
double steady_now_s();

// "peer failure: rank 2, phase 'heartbeat', plan epoch 3, deadline 10.0 s: ..."
// The text of the error in both languages.
std::string describe(const Failure& failure);

// `text` with one space for each run of white space, and none at its ends.
std::string one_line(std::string_view text);

// Bytes of the store's `abort` key. decode() never throws, and gives text that
// a terminal may show (core/plain_text.h): foreign bytes are the reason of a
// failure of phase "abort".
std::string encode(const Failure& failure);
Failure decode(std::string_view bytes);

// Thrown out of C++ waits and collectives; what() is describe(failure). Python
// knows it as `PeerFailure`: see bind_autodp_failure.cpp.
class PeerFailureError : public std::runtime_error {
 public:
  explicit PeerFailureError(Failure failure)
      : std::runtime_error(describe(failure)), failure_(std::move(failure)) {}

  const Failure& failure() const noexcept {
    return failure_;
  }

 private:
  Failure failure_;
};

class FailureLatch {
 public:
  using Callback = std::function<void(const Failure&)>;

  FailureLatch() = default;
  FailureLatch(const FailureLatch&) = delete;
  FailureLatch& operator=(const FailureLatch&) = delete;

  // The plan epoch that failures are reported with unless they name one.
  void set_epoch(int64_t epoch);

  // Latches the first failure and runs every subscribed callback in the calling
  // thread, outside the lock. Returns false when one was latched before.
  bool fail(Failure failure);

  // Notes a symptom whose cause may still become known: a peer that fails tells
  // everybody why and then closes its connections, and the broken connection
  // may be noticed first. The first symptom stays. `now_s` is a steady clock.
  void suspect(Failure failure, double now_s);

  // Latches the symptom as the failure if it was `grace_s` old at `at_s` and
  // nothing else was latched. Called regularly by the watcher: see
  // Note [Accounts come first].
  void confirm(double at_s, double grace_s);

  // The failure is on the store for the others to read.
  void note_told();

  // Waits until note_told(), or until the failure is `limit_s` old; not at all
  // without a failure. Whoever closes connections to peers calls this before.
  void wait_told(double limit_s) const;

  // The watcher has ended, so nobody calls confirm() any more: latches the
  // symptom there is, and from now on each symptom as soon as it is noted.
  void confirm_directly();

  bool failed() const;
  std::optional<Failure> failure() const;

  // Throws PeerFailureError when a failure is latched.
  void check() const;

  // Calls back once, when a failure is latched; at once if one already is (the
  // result is 0 then). A callback must not throw. unsubscribe() does not wait
  // for a callback that is running.
  uint64_t subscribe(Callback callback);
  void unsubscribe(uint64_t subscription);

 private:
  mutable std::mutex mutex_;
  std::optional<Failure> failure_;
  std::optional<Failure> symptom_;
  double symptom_s_ = 0;
  bool confirms_ = true;  // somebody calls confirm()
  double failed_s_ = 0;
  bool told_ = false;
  mutable std::condition_variable told_changed_;
  int64_t epoch_ = -1;
  std::map<uint64_t, Callback> callbacks_;
  uint64_t next_subscription_ = 1;
};

}  // namespace pipetransformer::autodp
