// State of the default random generators: what a recomputation needs when cells
// draw from them as the removed torch Pipe did (strict mode). Draws are then in
// the order of the cells, so the caller runs them one after another.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <utility>
#include <vector>

namespace pipetransformer::pipe {

using GeneratorStates = std::vector<std::pair<c10::Device, at::Tensor>>;

// States of the CPU generator and of `device`'s.
GeneratorStates generator_states(c10::Device device);

// Puts the states in force for its lifetime, then the present ones back.
class ReplayedDraws {
 public:
  explicit ReplayedDraws(const GeneratorStates& states);
  ~ReplayedDraws();
  ReplayedDraws(const ReplayedDraws&) = delete;
  ReplayedDraws& operator=(const ReplayedDraws&) = delete;

 private:
  GeneratorStates previous_;
};

}  // namespace pipetransformer::pipe
