#include "pipe/pipe_call.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>

#include "pipe/border_node.h"
#include "pipe/cell_range.h"
#include "pipe/cut_off.h"
#include "pipe/node_ptr.h"

namespace pipetransformer::pipe {

namespace {

// The data of an output without its graph.
Activation cut(const at::Tensor& tensor) {
  const bool requires_grad = tensor.defined() && tensor.requires_grad();
  return {requires_grad ? cut_off(tensor) : tensor, requires_grad, 0};
}

// The stages that share casts of weights: all or none.
std::size_t num_casting(const CallSettings& settings) {
  const bool wanted =
      WeightCastScope::wanted(settings.devices) && WeightCastScope::available();
  return wanted ? settings.num_stages : 0;
}

}  // namespace

PipeCall::PipeCall(
    CallSettings settings,
    std::shared_ptr<const BackwardPlan> plan,
    std::shared_ptr<StageCalls> stages,
    std::vector<Activations> inputs)
    : settings_(std::move(settings)),
      plan_(std::move(plan)),
      stages_(std::move(stages)),
      context_(settings_.devices),
      casts_(std::make_shared<StageCasts>(num_casting(settings_))),
      cells_(
          static_cast<std::size_t>(settings_.num_stages) *
          settings_.num_microbatches),
      in_flight_(std::move(inputs)),
      in_lanes_(
          static_cast<std::size_t>(settings_.num_microbatches) *
          settings_.lanes->count),
      in_flight_marks_(
          in_flight_.size(),
          settings_.streams->mark_border(settings_.devices.front())),
      in_lane_marks_(in_lanes_.size()),
      shortest_calls_ns_(settings_.num_stages, 0) {
  check_workers_can_draw(settings_.draw_mode != DrawMode::kFallback);
  streams().begin();
}

// Enters the casts, the draws and the phase of this cell around the call.
Tensors PipeCall::draw_and_call(
    CellId id,
    Phase phase,
    const Tensors& inputs,
    StageCasts& casts) {
  std::optional<WeightCastScope> shared_casts;
  if (!casts.empty()) {
    const auto& weights = plan_->parameters;
    shared_casts.emplace(
        casts[id.stage],
        settings_.record && !weights.empty() ? &weights[id.stage] : nullptr);
  }
  std::optional<DrawScope> draws;
  if (settings_.draw_mode != DrawMode::kGlobal) {
    DrawPosition position = settings_.draws;
    position.microbatch += id.microbatch;
    draws.emplace(
        position,
        settings_.first_layers[id.stage],
        settings_.draw_mode == DrawMode::kKeyed);
  }
  const PhaseScope scope(phase);
  return stages_->call(id, phase, inputs);
}

Tensors PipeCall::call_stage(
    CellId id,
    Phase phase,
    const Tensors& inputs,
    StageCasts& casts) {
  if (!settings_.timed || phase == Phase::kRecomputing) {
    return draw_and_call(id, phase, inputs, casts);
  }
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  Tensors outputs = draw_and_call(id, phase, inputs, casts);
  const int64_t spent_ns =
      std::chrono::nanoseconds(Clock::now() - start).count();
  int64_t& shortest_ns = shortest_calls_ns_[id.stage];
  shortest_ns = shortest_ns == 0 ? spent_ns : std::min(shortest_ns, spent_ns);
  return outputs;
}

// Takes the inputs to the stage's device. Runs inside the caller's context.
Activations PipeCall::bring_inputs(CellId id, Cell& cell) {
  const c10::Device device = settings_.devices[id.stage];
  const auto bring = [&](Activation& input, const device::Mark& ready) {
    cell.input_devices.push_back(
        input.value.defined() ? input.value.device() : device);
    input.value = streams().bring(input.value, device, ready);
  };
  Activations inputs = std::move(in_flight_[id.microbatch]);
  for (Activation& input : inputs) {
    bring(input, in_flight_marks_[id.microbatch]);
  }
  for (const int32_t lane : settings_.lanes->popped[id.stage]) {
    const auto index = id.microbatch * settings_.lanes->count + lane;
    inputs.push_back(std::move(in_lanes_[index]));
    check_skip_unchanged(
        inputs.back().value,
        inputs.back().version,
        settings_.lanes->sources[lane],
        id.stage);
    bring(inputs.back(), in_lane_marks_[index]);
    in_lane_marks_[index] = {};
  }
  return inputs;
}

void PipeCall::send_outputs(CellId id, Activations outputs) {
  const std::vector<int32_t>& stashed = settings_.lanes->stashed[id.stage];
  const std::size_t num_border = outputs.size() - stashed.size();
  const device::Mark written =
      streams().mark_border(settings_.devices[id.stage]);
  for (std::size_t k = 0; k < stashed.size(); ++k) {
    const auto index = id.microbatch * settings_.lanes->count + stashed[k];
    in_lanes_[index] = std::move(outputs[num_border + k]);
    in_lanes_[index].version = version_of(in_lanes_[index].value);
    in_lane_marks_[index] = written;
  }
  outputs.resize(num_border);
  in_flight_[id.microbatch] = std::move(outputs);
  in_flight_marks_[id.microbatch] = written;
}

// Gives the inputs that carry gradient their border history. Runs inside the
// caller's context. `shared`: the history must not reach `inputs` themselves:
// they are kept, or views of what other micro-batches see.
Tensors PipeCall::attach_inputs(
    CellId id,
    const Activations& inputs,
    Cell& cell,
    const std::vector<Cell>& cells,
    bool shared) {
  const torch::autograd::edge_list below =
      settings_.linked ? producers(id, cells) : torch::autograd::edge_list();
  NodePtr border;
  NodePtr end;
  Tensors attached;
  attached.reserve(inputs.size());
  cell.input_edges.assign(inputs.size(), {});
  for (std::size_t p = 0; p < inputs.size(); ++p) {
    const at::Tensor& value = inputs[p].value;
    if (!value.defined()) {
      attached.emplace_back();
      continue;
    }
    at::Tensor tensor = value;
    if (inputs[p].requires_grad) {
      if (!border) {
        border = make_node<BorderNode>();
      }
      if (shared) {
        tensor = cut_off(tensor);
      }
      const bool leads_on = p < below.size() && below[p].is_valid();
      if (!leads_on && !end) {
        end = make_node<EndNode>();
      }
      border->add_next_edge(
          leads_on
              ? below[p]
              : torch::autograd::Edge(end, end->add_input_metadata(tensor)));
      torch::autograd::set_history(tensor, border);
      cell.input_edges[p] = torch::autograd::impl::gradient_edge(tensor);
    }
    attached.push_back(std::move(tensor));
  }
  return attached;
}

// Where the gradients of a cell's inputs go on, among the outputs of `cells`;
// empty below the first stage and where nothing requires grad.
torch::autograd::edge_list
PipeCall::producers(CellId id, const std::vector<Cell>& cells) const {
  torch::autograd::edge_list edges;
  if (id.stage == 0) {
    return edges;
  }
  const Lanes& lanes = *settings_.lanes;
  const auto outputs_of = [&](int32_t stage) -> const auto& {
    return cells[index_of({stage, id.microbatch})].output_edges;
  };
  const auto num_border = [&](int32_t stage) {
    const std::size_t count = outputs_of(stage).size();
    return count == 0 ? 0 : count - lanes.stashed[stage].size();
  };
  const auto& below = outputs_of(id.stage - 1);
  edges.assign(
      below.begin(),
      below.begin() + static_cast<std::ptrdiff_t>(num_border(id.stage - 1)));
  for (const int32_t lane : lanes.popped[id.stage]) {
    const int32_t source = lanes.sources[lane];
    const auto& outputs = outputs_of(source);
    edges.push_back(
        outputs.empty() ? torch::autograd::Edge()
                        : outputs[num_border(source) + lanes.positions[lane]]);
  }
  return edges;
}

void PipeCall::forward_cell(CellId id) {
  const bool checkpoint = checkpointed(id);
  const CellScope scope(
      context_, settings_.devices[id.stage], streams().own_stream(id.stage));
  const CellRange range(id, "");
  Cell cell;
  Activations received = bring_inputs(id, cell);
  std::vector<int64_t> versions;
  GeneratorStates draws;
  if (checkpoint && settings_.record) {
    if (settings_.draw_mode == DrawMode::kGlobal) {
      draws = generator_states(settings_.devices[id.stage]);
    }
    for (const Activation& input : received) {
      versions.push_back(version_of(input.value));
    }
  }
  const Tensors attached =
      attach_inputs(id, received, cell, cells_, checkpoint || id.stage == 0);
  // Draws that are none of torch's own: the recomputation makes others.
  const auto drawn =
      checkpoint && settings_.record && settings_.draw_mode == DrawMode::kKeyed
          ? default_offset(settings_.devices[id.stage])
          : std::nullopt;
  const bool several = settings_.record && attached.size() > 1;
  const std::vector<int64_t> before =
      several ? versions_of(attached) : std::vector<int64_t>();
  const Tensors outputs = call_stage(
      id,
      checkpoint ? Phase::kCheckpointing : Phase::kPlain,
      attached,
      *casts_);
  if (drawn && default_offset(settings_.devices[id.stage]) != drawn) {
    TORCH_WARN_ONCE(
        "pipe: the default generator of ",
        settings_.devices[id.stage],
        " has moved in a cell that is recomputed: an operation that is not "
        "torch's own draws from it, and will draw other numbers then. Keep "
        "activations (checkpoint=\"never\"), or give it a generator of its "
        "own");
  }
  if (several) {
    check_no_shared_change(describe(id), attached, before);
  }
  if (settings_.record) {
    cell.reached = check_own_leaves(
        *stages_,
        id.stage,
        outputs,
        plan_->parameters[id.stage],
        cell.input_edges);
  }
  bool any = false;
  Activations sent;
  sent.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    sent.push_back(cut(output));
    const bool requires_grad = settings_.record && sent.back().requires_grad;
    sent.back().requires_grad = requires_grad;
    any = any || requires_grad;
    cell.output_requires_grad.push_back(requires_grad);
    if (!checkpoint) {
      cell.output_edges.push_back(
          requires_grad ? torch::autograd::impl::gradient_edge(output)
                        : torch::autograd::Edge());
    }
  }
  send_outputs(id, std::move(sent));
  if (!any) {
    return;  // nothing to do in backward, nothing to keep
  }
  if (checkpoint) {
    cell.inputs = std::move(received);
    cell.input_versions = std::move(versions);
    cell.draws = std::move(draws);
    for (auto& edge : cell.input_edges) {
      edge.function.reset();  // the recomputation makes its own
    }
  }
  this->cell(id) = std::move(cell);
}

void PipeCall::finish() {
  if (settings_.draws.seed) {
    settings_.draws.seed->settle();
  }
  streams().join();
  for (WeightCasts& casts : *casts_) {
    casts.clear();
  }
  for (std::size_t i = 0; i < in_flight_.size(); ++i) {
    for (Activation& output : in_flight_[i]) {
      if (output.value.defined()) {
        output.value = streams().bring(
            output.value, output.value.device(), in_flight_marks_[i]);
      }
    }
  }
}

Activations PipeCall::take_output(int32_t microbatch) {
  return std::move(in_flight_[microbatch]);
}

bool PipeCall::output_requires_grad() {
  for (int32_t i = 0; i < settings_.num_microbatches; ++i) {
    for (const bool value :
         cell({settings_.num_stages - 1, i}).output_requires_grad) {
      if (value) {
        return true;
      }
    }
  }
  return false;
}

bool PipeCall::sums_within_cells() const {
  return std::any_of(
             cells_.begin(),
             cells_.end(),
             [](const Cell& cell) { return cell.reached.has_sums; }) &&
         !microbatches_share_nodes();
}

// Leaves, which a backward does not free, do not count.
bool PipeCall::microbatches_share_nodes() const {
  ska::flat_hash_map<const torch::autograd::Node*, int32_t> met;
  std::vector<const torch::autograd::Node*> open;
  for (int32_t i = 0; i < settings_.num_microbatches; ++i) {
    for (int32_t j = 0; j < settings_.num_stages; ++j) {
      for (const auto& edge : cells_[index_of({j, i})].output_edges) {
        open.push_back(edge.function.get());
      }
    }
    while (!open.empty()) {
      const torch::autograd::Node* node = open.back();
      open.pop_back();
      if (node == nullptr || node->next_edges().empty()) {
        continue;
      }
      const auto [found, is_new] = met.emplace(node, i);
      if (!is_new) {
        if (found->second != i) {
          return true;
        }
        continue;
      }
      for (const auto& edge : node->next_edges()) {
        open.push_back(edge.function.get());
      }
    }
  }
  return false;
}

void PipeCall::recompute_cell(
    CellId id,
    std::vector<Cell>& cells,
    StageCasts& casts) {
  const Cell& kept = cell(id);
  Cell& into = cells[index_of(id)];
  into = Cell();
  if (kept.output_requires_grad.empty()) {
    return;
  }
  const CellScope scope(
      context_, settings_.devices[id.stage], streams().own_stream(id.stage));
  into.input_devices = kept.input_devices;
  for (std::size_t p = 0; p < kept.inputs.size(); ++p) {
    if (version_of(kept.inputs[p].value) != kept.input_versions[p]) {
      throw std::runtime_error(
          "checkpointed input " + std::to_string(p) + " of " + describe(id) +
          ": expected to be unchanged since its forward, got an in-place "
          "change (as with a leaf Variable that requires grad has been used in "
          "an in-place operation, recomputing would apply it twice); use an "
          "out-of-place operation or checkpoint='never'");
    }
  }
  std::optional<ReplayedDraws> draws;
  if (!kept.draws.empty()) {
    draws.emplace(kept.draws);
  }
  const Tensors outputs = call_stage(
      id,
      Phase::kRecomputing,
      attach_inputs(id, kept.inputs, into, cells, /*shared=*/true),
      casts);
  if (outputs.size() != kept.output_requires_grad.size()) {
    throw std::runtime_error(
        "recomputation of " + describe(id) + ": expected " +
        std::to_string(kept.output_requires_grad.size()) +
        " output tensors as in its forward, got " +
        std::to_string(outputs.size()));
  }
  check_same_leaves(
      *stages_,
      id,
      kept.output_requires_grad,
      kept.reached.parameters,
      outputs,
      plan_->parameters[id.stage],
      into.input_edges);
  into.output_requires_grad = kept.output_requires_grad;
  for (std::size_t p = 0; p < outputs.size(); ++p) {
    const bool carries = kept.output_requires_grad[p] && outputs[p].defined() &&
                         outputs[p].requires_grad();
    into.output_edges.push_back(
        carries ? torch::autograd::impl::gradient_edge(outputs[p])
                : torch::autograd::Edge());
  }
}

}  // namespace pipetransformer::pipe
