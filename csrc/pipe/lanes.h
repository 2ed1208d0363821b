// Skip lanes: tensors that go from the stage that stashes them straight to the
// stage that pops them, past those in between.
#pragma once

#include <cstdint>
#include <vector>

namespace pipetransformer::pipe {

struct Lane {
  int32_t source = 0;       // stage
  int32_t destination = 0;  // a later stage
};

// The lanes of a pipe, by what a stage has to do with them. Immutable.
struct Lanes {
  int32_t count = 0;
  std::vector<std::vector<int32_t>> popped;  // lane numbers, by stage
  std::vector<std::vector<int32_t>> stashed;
  std::vector<int32_t> sources;    // stage, by lane
  std::vector<int32_t> positions;  // in `stashed` of its source, by lane

  // Throws std::invalid_argument unless every lane goes from a stage to a later
  // one of `num_stages`.
  static Lanes make(const std::vector<Lane>& lanes, int32_t num_stages);
};

}  // namespace pipetransformer::pipe
