#include "pipe/border_grads.h"

#include <utility>

namespace pipetransformer::pipe {

BorderGrads::BorderGrads(const CallSettings& settings)
    : settings_(settings),
      grads_(settings.num_microbatches),
      marks_(grads_.size()),
      devices_(grads_.size()),
      lane_grads_(
          static_cast<std::size_t>(settings.num_microbatches) *
          settings.lanes->count),
      lane_marks_(lane_grads_.size()) {}

void BorderGrads::set_output_grads(
    int32_t microbatch,
    Tensors grads,
    const device::Mark& written) {
  grads_[microbatch] = std::move(grads);
  marks_[microbatch] = written;
}

Tensors BorderGrads::take_output_grads(
    CellId id,
    const torch::autograd::edge_list& outputs) {
  Tensors grads = std::move(grads_[id.microbatch]);
  // A stage above that detaches everything hands down no gradient at all.
  const Lanes& lanes = *settings_.lanes;
  const std::vector<int32_t>& stashed = lanes.stashed[id.stage];
  const std::size_t num_border =
      outputs.size() < stashed.size() ? 0 : outputs.size() - stashed.size();
  grads.resize(num_border);
  std::vector<device::Mark> marks(num_border, marks_[id.microbatch]);
  for (const int32_t lane : stashed) {
    const auto index = id.microbatch * lanes.count + lane;
    grads.push_back(std::move(lane_grads_[index]));
    marks.push_back(std::move(lane_marks_[index]));
  }
  grads.resize(outputs.size());
  for (std::size_t p = 0; p < grads.size(); ++p) {
    const auto& [node, input] = outputs[p];
    grads[p] =
        node == nullptr
            ? at::Tensor()
            : settings_.streams->bring(
                  grads[p], node->input_metadata(input).device(), marks[p]);
  }
  return grads;
}

device::Mark BorderGrads::hand_down(
    CellId id,
    const torch::autograd::edge_list& inputs,
    const std::vector<c10::Device>& input_devices,
    Tensors grads) {
  const Lanes& lanes = *settings_.lanes;
  const std::vector<int32_t>& popped = lanes.popped[id.stage];
  Tensors by_position(inputs.size());
  std::size_t next = 0;
  for (std::size_t p = 0; p < by_position.size(); ++p) {
    if (inputs[p].is_valid()) {
      by_position[p] = std::move(grads[next++]);
    }
  }
  const device::Mark written =
      settings_.streams->mark(settings_.devices[id.stage]);
  if (by_position.size() >= popped.size()) {
    const std::size_t num_border = by_position.size() - popped.size();
    for (std::size_t k = 0; k < popped.size(); ++k) {
      const auto index = id.microbatch * lanes.count + popped[k];
      lane_grads_[index] = std::move(by_position[num_border + k]);
      lane_marks_[index] = written;
    }
    by_position.resize(num_border);
  }
  grads_[id.microbatch] = std::move(by_position);
  devices_[id.microbatch] = input_devices;
  marks_[id.microbatch] = written;
  return written;
}

std::vector<Tensors> BorderGrads::take_input_grads() {
  for (std::size_t i = 0; i < grads_.size(); ++i) {
    for (std::size_t p = 0; p < grads_[i].size(); ++p) {
      grads_[i][p] =
          settings_.streams->bring(grads_[i][p], devices_[i][p], marks_[i]);
    }
  }
  return std::move(grads_);
}

}  // namespace pipetransformer::pipe
