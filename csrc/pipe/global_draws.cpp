#include "pipe/global_draws.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <mutex>

namespace pipetransformer::pipe {

namespace {

void set_states(const GeneratorStates& states) {
  for (const auto& [device, state] : states) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
  }
}

void add_state(GeneratorStates& states, c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  states.emplace_back(device, generator.get_state());
}

}  // namespace

GeneratorStates generator_states(c10::Device device) {
  GeneratorStates states;
  add_state(states, c10::kCPU);
  if (!device.is_cpu() && !device.is_meta()) {
    add_state(states, device);
  }
  return states;
}

ReplayedDraws::ReplayedDraws(const GeneratorStates& states) {
  for (const auto& [device, state] : states) {
    add_state(previous_, device);
  }
  set_states(states);
}

ReplayedDraws::~ReplayedDraws() {
  set_states(previous_);
}

}  // namespace pipetransformer::pipe
