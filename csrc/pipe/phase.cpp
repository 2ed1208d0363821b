#include "pipe/phase.h"

#include <utility>

namespace pipetransformer::pipe {

namespace {
thread_local Phase phase_of_thread = Phase::kPlain;
}  // namespace

Phase current_phase() noexcept {
  return phase_of_thread;
}

PhaseScope::PhaseScope(Phase phase) noexcept
    : previous_(std::exchange(phase_of_thread, phase)) {}

PhaseScope::~PhaseScope() {
  phase_of_thread = previous_;
}

}  // namespace pipetransformer::pipe
