// One forward call of a pipeline: its cells, and what each keeps for backward.
//
// A cell (micro-batch i on stage j) gets its inputs cut off from the previous
// stage's graph and so owns a graph of its own until its backward.
// Thread safety: cells of different stages run on different threads; the order
// of the schedule is what makes a cell's data visible to the next stage.
// Nothing here is locked. Ownership: holds the activations that backward needs,
// and nothing else once the forward is over; dropping it frees them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "device/pipeline_streams.h"
#include "pipe/cell_checks.h"
#include "pipe/context.h"
#include "pipe/dispatch.h"
#include "pipe/global_draws.h"
#include "pipe/lanes.h"
#include "pipe/random.h"
#include "pipe/stage_calls.h"
#include "pipe/weight_casts.h"

namespace pipetransformer::pipe {

// A tensor at a stage border, cut off from the graph that made it. Undefined in
// a skip lane that carries None.
struct Activation {
  at::Tensor value;
  bool requires_grad = false;
  int64_t version = 0;  // in a skip lane: when it was stashed
};
using Activations = std::vector<Activation>;

enum class DrawMode : uint8_t {
  kKeyed,     // by (seed, step, micro-batch, layer)
  kFallback,  // the same draws, cells one by one: keyed_draws_work() is false
  kGlobal,    // from the default generators, in the order of the cells
};

struct CallSettings {
  int32_t num_stages = 1;
  int32_t num_microbatches = 1;
  // Micro-batches below this are checkpointed.
  int32_t num_checkpointed = 0;
  bool record = false;  // gradients are recorded
  bool timed = false;   // shortest_calls_ns() is wanted
  // Borders lead on to the cell below, so that one call of autograd can run
  // several cells. For one dispatcher on the CPU that nobody profiles.
  bool linked = false;
  DrawMode draw_mode = DrawMode::kKeyed;
  DrawPosition draws;                 // of micro-batch 0; no seed with kGlobal
  std::vector<int64_t> first_layers;  // by stage, absolute
  std::vector<c10::Device> devices;   // by stage
  std::shared_ptr<device::PipelineStreams> streams;
  std::shared_ptr<const Lanes> lanes;
  Dispatch dispatch = Dispatch::kThreads;
};

// Where backward delivers to.
struct BackwardPlan {
  int32_t first_stage = 0;  // lowest stage with anything to do
  std::vector<torch::autograd::edge_list> parameters;  // by stage
};

// What one cell keeps for its backward. Inputs and outputs are those of the
// border, then those of skip lanes.
struct Cell {
  // Where the gradient of input p arrives; invalid where none is carried.
  torch::autograd::edge_list input_edges;
  // Where the gradient of output p enters; empty when checkpointed.
  torch::autograd::edge_list output_edges;
  std::vector<bool> output_requires_grad;
  Reached reached;
  std::vector<c10::Device> input_devices;  // where the inputs came from
  // Checkpointed cells only: what the recomputation starts from.
  Activations inputs;
  std::vector<int64_t> input_versions;
  GeneratorStates draws;  // DrawMode::kGlobal only
};

class PipeCall {
 public:
  // `inputs`: the first stage's, by micro-batch. Throws std::runtime_error
  // inside a draw scope that its workers would wait for.
  PipeCall(
      CallSettings settings,
      std::shared_ptr<const BackwardPlan> plan,
      std::shared_ptr<StageCalls> stages,
      std::vector<Activations> inputs);

  const CallSettings& settings() const noexcept {
    return settings_;
  }
  const CallerContext& context() const noexcept {
    return context_;
  }
  StageCalls& stages() noexcept {
    return *stages_;
  }
  device::PipelineStreams& streams() const noexcept {
    return *settings_.streams;
  }
  std::size_t num_cells() const noexcept {
    return cells_.size();
  }
  std::size_t index_of(CellId id) const noexcept {
    return static_cast<std::size_t>(id.stage) * settings_.num_microbatches +
           id.microbatch;
  }
  Cell& cell(CellId id) {
    return cells_[index_of(id)];
  }
  bool checkpointed(CellId id) const noexcept {
    return id.microbatch < settings_.num_checkpointed;
  }

  // Runs a cell forward, inside a CallerScope of context(); the previous
  // stage's must be over.
  void forward_cell(CellId id);
  // To be called on the caller's thread when no cell runs any more, failed or
  // not: settles the seed of the draws, and lets its current streams use the
  // outputs and all other memory.
  void finish();
  // The last stage's output of one micro-batch; can be taken once.
  Activations take_output(int32_t microbatch);
  const Activations& output(int32_t microbatch) const {
    return in_flight_[microbatch];
  }
  // Some output of some micro-batch requires grad.
  bool output_requires_grad();
  // The gradients of a parameter are added up within each micro-batch before
  // they are over micro-batches, and every cell has a graph of its own.
  bool sums_within_cells() const;
  // By stage, the shortest forward call in nanoseconds; zero when none.
  const std::vector<int64_t>& shortest_calls_ns() const noexcept {
    return shortest_calls_ns_;
  }

  // Runs a checkpointed cell's forward again, inside a CallerScope of
  // context(), this time keeping its graph; fills its place in `cells` (by
  // index_of) like an uncheckpointed cell. Throws std::runtime_error when the
  // stage changed its inputs in place, or gives another number of outputs.
  // `casts`: of the run that this is part of.
  void recompute_cell(CellId id, std::vector<Cell>& cells, StageCasts& casts);

  // Those of the forward, until finish().
  const std::shared_ptr<StageCasts>& casts() const noexcept {
    return casts_;
  }
  // For a run of its own, between which and the forward weights may change.
  std::shared_ptr<StageCasts> new_casts() const {
    return std::make_shared<StageCasts>(casts_->size());
  }

 private:
  bool microbatches_share_nodes() const;
  Activations bring_inputs(CellId id, Cell& cell);
  void send_outputs(CellId id, Activations outputs);
  Tensors
  call_stage(CellId id, Phase phase, const Tensors& inputs, StageCasts& casts);
  Tensors draw_and_call(
      CellId id,
      Phase phase,
      const Tensors& inputs,
      StageCasts& casts);
  Tensors attach_inputs(
      CellId id,
      const Activations& inputs,
      Cell& cell,
      const std::vector<Cell>& cells,
      bool shared);
  torch::autograd::edge_list
  producers(CellId id, const std::vector<Cell>& cells) const;

  const CallSettings settings_;
  const std::shared_ptr<const BackwardPlan> plan_;
  const std::shared_ptr<StageCalls> stages_;
  const CallerContext context_;
  const std::shared_ptr<StageCasts> casts_;
  std::vector<Cell> cells_;  // by stage, then micro-batch
  // Handed from stage to stage, by micro-batch.
  std::vector<Activations> in_flight_;
  std::vector<Activation> in_lanes_;  // by micro-batch, then lane
  // After the former were written.
  std::vector<device::Mark> in_flight_marks_;
  std::vector<device::Mark> in_lane_marks_;
  std::vector<int64_t> shortest_calls_ns_;  // by stage
};

}  // namespace pipetransformer::pipe
