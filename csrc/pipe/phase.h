// What the current thread is doing with a checkpointed cell; read by the
// user's layers through is_checkpointing() and is_recomputing().
// Thread-local, so every function is thread-safe.
#pragma once

#include <cstdint>

namespace pipetransformer::pipe {

enum class Phase : uint8_t {
  kPlain,          // not checkpointed
  kCheckpointing,  // forward whose activations are not kept
  kRecomputing,    // the same forward again, before its backward
};

Phase current_phase() noexcept;

class PhaseScope {
 public:
  explicit PhaseScope(Phase phase) noexcept;
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Phase previous_;
};

}  // namespace pipetransformer::pipe
