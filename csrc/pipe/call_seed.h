// The seed of one call's random draws, and the draw that pays for it.
//
// A call of a pipeline takes its seed from the generator of its caller: one
// draw, if a cell draws, and none otherwise. Which of the two is known at the
// end only, so the seed is what a draw would have given when the call began,
// and the draw itself is taken when the forward is over, by a call in which
// something has drawn. What cells do meanwhile to that generator, torch's
// manual_seed included, therefore changes no seed, whatever the timing.
//
// Thread safety: claim() and note_draw() may be called from any thread; the
// other functions belong to the thread of the call.
#pragma once

#include <ATen/core/Generator.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace pipetransformer::pipe {

class CallSeed {
 public:
  // A seed that is known: nothing is taken from any generator.
  explicit CallSeed(uint64_t value);

  // What the next draw of `source` gives, a CPU generator; it stays as it is.
  // `enclosing`: the seed of the cell whose generator that is; null for the
  // process-wide default one.
  CallSeed(at::Generator source, std::shared_ptr<CallSeed> enclosing);

  ~CallSeed();
  CallSeed(const CallSeed&) = delete;
  CallSeed& operator=(const CallSeed&) = delete;

  // The seed; it is the same each time. Of calls that run at once in several
  // threads no two get the same one, though they may have seen the same
  // generator.
  uint64_t claim();

  // Something has drawn. After settle(), which is in a recomputation, the first
  // one takes the draw there and then.
  void note_draw();

  // Nothing is left to be noted. Free to ask.
  bool drawn() const noexcept {
    return (state_.load(std::memory_order_relaxed) & kDrawn) != 0;
  }

  // The forward is over: takes the draw if there is one to take. Once; more
  // calls do nothing.
  void settle();

 private:
  static constexpr uint8_t kClaimed = 1;
  static constexpr uint8_t kDrawn = 2;
  static constexpr uint8_t kSettled = 4;

  void take();
  void leave();

  at::Generator source_;
  const std::shared_ptr<CallSeed> enclosing_;
  uint64_t value_;
  uint64_t claims_before_ = 0;
  bool waits_for_draw_ = false;  // guarded by the mutex of all claims
  std::atomic<uint8_t> state_;
};

}  // namespace pipetransformer::pipe
