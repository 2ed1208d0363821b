// Keyed random draws: inside a DrawScope every random operation of the thread
// that was given no generator draws from one keyed by (seed, step, micro-batch,
// layer). Draws therefore do not depend on thread timing, stages or cuts, and a
// recomputation repeats them; the default generators stay untouched, except for
// the one draw that a seed of the caller's costs if something draws (CallSeed).
// See Note [Supplying the generator] in random.cpp.
//
// Thread safety: all state is per thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/SafePyObject.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "pipe/call_seed.h"

namespace pipetransformer::pipe {

struct DrawPosition {
  std::shared_ptr<CallSeed> seed;
  int64_t step = 0;
  int64_t microbatch = 0;  // numbered over all replicas
};

// Registers the mechanism once per process and tests that it works on this
// torch. Where it does not, scopes fall back to seeding the default CPU
// generator, one scope at a time in the process, with equal draws. Call it
// without the GIL.
bool keyed_draws_work();

class DrawScope {
 public:
  // Starts at `layer`. `keyed` false forces the fallback; it blocks while
  // another thread is in a fallback scope (call it without the GIL).
  DrawScope(const DrawPosition& position, int64_t layer, bool keyed);
  ~DrawScope();
  DrawScope(const DrawScope&) = delete;
  DrawScope& operator=(const DrawScope&) = delete;

  struct State;

 private:
  std::unique_ptr<State> state_;
  State* previous_;
};

// Call it before work of a pipe is queued. Throws std::runtime_error where that
// could only wait for ever: this thread is in a fallback scope, and the workers
// would need one each (`keyed` false).
void check_workers_can_draw(bool keyed);

// Draws from here on belong to `layer`; nothing happens outside a scope.
void set_draw_layer(int64_t layer);

// Tells whether a pack hook of saved tensors is one of torch.utils.checkpoint,
// which Python knows. What draws below such a hook is refused: the
// recomputation would repeat draws of the default generators, and these are
// none of them.
using IsCheckpoint = bool (*)(const c10::SafePyObject& pack_hook);
void set_checkpoint_test(IsCheckpoint test);

// How far the default generator of an accelerator has come, apart from what is
// lent of it at the moment; none where that cannot be told (CPU, a capture). It
// moves in a cell where something draws that is not torch's own.
std::optional<uint64_t> default_offset(c10::Device device);

// The seed of a call that begins on this thread: the given one; without one
// what the next draw from the default CPU generator gives, or from that of the
// scope that the thread is in. To be settled when the call's forward is over.
std::shared_ptr<CallSeed> seed_of_call(std::optional<uint64_t> given);

}  // namespace pipetransformer::pipe
