#include "pipe/call_seed.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <mutex>
#include <utility>

#include "core/hash.h"

namespace pipetransformer::pipe {

namespace {

// Note [Calls at once]
// Calls of several threads that begin before one of them has taken its draw
// look at the same state of the default generator, and would draw the same. So
// the first that asks for a seed gets what it saw, and a later one that mixed
// with its number among all claims of the process, which is unique. A call
// alone, and one alongside calls that ask for none, is always the first. What
// asks is what may draw: a cell that seeds a generator, or calls another pipe.
struct Claims {
  std::mutex mutex;
  uint64_t made = 0;
  uint64_t unsettled = 0;  // of calls whose draw has not been taken yet
};

Claims& claims() {
  static Claims all;
  return all;
}

uint64_t draw(const at::Generator& generator) {
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

uint64_t next_draw(at::Generator& generator) {
  const at::Generator copy = [&] {
    const std::lock_guard lock(generator.mutex());
    return generator.clone();
  }();
  return draw(copy);
}

}  // namespace

CallSeed::CallSeed(uint64_t value)
    : value_(value), state_(kClaimed | kDrawn | kSettled) {}

CallSeed::CallSeed(at::Generator source, std::shared_ptr<CallSeed> enclosing)
    : source_(std::move(source)), enclosing_(std::move(enclosing)), state_(0) {
  if (enclosing_) {  // nobody else draws from that generator now
    value_ = next_draw(source_);
    state_ = kClaimed;
    return;
  }
  const std::lock_guard lock(claims().mutex);
  value_ = next_draw(source_);
  claims_before_ = claims().made - claims().unsettled;
}

CallSeed::~CallSeed() {
  if ((state_.load() & kSettled) == 0) {  // the call has failed before its end
    const std::lock_guard lock(claims().mutex);
    leave();
  }
}

uint64_t CallSeed::claim() {
  if ((state_.load(std::memory_order_acquire) & kClaimed) != 0) {
    return value_;
  }
  const std::lock_guard lock(claims().mutex);
  const uint8_t state = state_.load(std::memory_order_relaxed);
  if ((state & kClaimed) == 0) {
    const uint64_t number = claims().made++;
    if (number != claims_before_) {
      const std::array<uint64_t, 2> words{value_, number};
      value_ = core::hash_bytes(words.data(), sizeof(words));
    }
    if ((state & kSettled) == 0) {
      ++claims().unsettled;
      waits_for_draw_ = true;
    }
    state_.fetch_or(kClaimed, std::memory_order_release);
  }
  return value_;
}

void CallSeed::note_draw() {
  const uint8_t before = state_.fetch_or(kDrawn);
  if ((before & kDrawn) != 0 || (before & kSettled) == 0) {
    return;
  }
  if (enclosing_) {  // that cell is over, and its generator with it
    enclosing_->note_draw();
  } else {
    take();
  }
}

void CallSeed::settle() {
  const uint8_t before = state_.fetch_or(kSettled);
  if ((before & kSettled) != 0) {
    return;
  }
  const bool drawn = (before & kDrawn) != 0;
  if (enclosing_) {
    if (drawn) {
      take();
      enclosing_->note_draw();
    }
    return;
  }
  // One step for calls that begin now: they see the draw taken, or count it.
  const std::lock_guard lock(claims().mutex);
  if (drawn) {
    take();
  }
  leave();
}

void CallSeed::take() {
  const std::lock_guard lock(source_.mutex());
  draw(source_);
}

// With the mutex of all claims held.
void CallSeed::leave() {
  if (waits_for_draw_) {
    waits_for_draw_ = false;
    --claims().unsettled;
  }
}

}  // namespace pipetransformer::pipe
