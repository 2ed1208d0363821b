// Gradients on their way down: at the borders between stages and in skip lanes,
// each with the mark after which it may be read.
//
// Thread safety: a micro-batch's gradients are touched by one stage at a time,
// in the order of the schedule. Nothing here is locked.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <vector>

#include "pipe/pipe_call.h"

namespace pipetransformer::pipe {

class BorderGrads {
 public:
  // `settings` must outlive this.
  explicit BorderGrads(const CallSettings& settings);

  // Gradients of the last stage's outputs, by position; undefined where none.
  // `written`: a mark after they were; empty where the last stage's stream did.
  void set_output_grads(
      int32_t microbatch,
      Tensors grads,
      const device::Mark& written);

  // Those of the border above a cell, then those of the lanes that start at its
  // stage, where its outputs are. Undefined where an output takes none.
  Tensors
  take_output_grads(CellId id, const torch::autograd::edge_list& outputs);

  // `grads`: of a cell's inputs that carry gradient, in order; `inputs` and
  // `input_devices`: of all, by position. Returns the mark after them.
  device::Mark hand_down(
      CellId id,
      const torch::autograd::edge_list& inputs,
      const std::vector<c10::Device>& input_devices,
      Tensors grads);

  // What has come down below the lowest stage, by micro-batch and position, for
  // use on the calling thread's current streams. Can be taken once.
  std::vector<Tensors> take_input_grads();

 private:
  const CallSettings& settings_;
  // Gradient at the border above the stage that runs next, by micro-batch.
  std::vector<Tensors> grads_;
  std::vector<device::Mark> marks_;
  std::vector<std::vector<c10::Device>> devices_;  // where the inputs came from
  Tensors lane_grads_;                             // by micro-batch, then lane
  std::vector<device::Mark> lane_marks_;
};

}  // namespace pipetransformer::pipe
