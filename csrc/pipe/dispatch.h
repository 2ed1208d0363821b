// Whether one dispatcher runs all stages or a thread each, chosen from measured
// cell times. Torch-free, pure apart from the estimate it keeps. Results do not
// depend on the choice.
//
// A hand-off between threads that both need the interpreter costs tens of
// microseconds, one dispatcher about one; threads pay where calls block outside
// the interpreter for longer than that. On accelerators calls return before the
// work is done, so one dispatcher launches for all devices.
#pragma once

#include <cstdint>
#include <vector>

namespace pipetransformer::pipe {

enum class Dispatch : uint8_t {
  kThreads,  // each stage runs its list, and waits for the others' counters
  kSerial,   // one worker runs all lists, in clock order
  kHere,     // the same in the calling thread: nothing is handed over (CPU)
};

class DispatchChoice {
 public:
  // Cells shorter than this on average are run by one dispatcher.
  static constexpr int64_t kShortCellNs = 100'000;
  // Once they are, they have to get this long to have threads again.
  static constexpr int64_t kLongCellNs = 150'000;

  // `blocking`: calls return when the work is done (CPU).
  explicit DispatchChoice(bool blocking)
      : blocking_(blocking),
        choice_(blocking ? Dispatch::kThreads : Dispatch::kSerial) {}

  Dispatch current() const noexcept {
    return choice_;
  }
  // `shortest_ns`: by stage, the shortest stage call of a forward pass; the
  // shortest, because threads make each other wait for the interpreter. Passes
  // with zero entries (a stage has not run) are left out, as is the first: it
  // warms up.
  void observe(const std::vector<int64_t>& shortest_ns);

 private:
  bool blocking_;
  bool warm_ = false;
  Dispatch choice_;
};

}  // namespace pipetransformer::pipe
