#include "pipe/cell_backward.h"

#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <unordered_set>

#include "pipe/cell_range.h"
#include "pipe/gradient_sum.h"

namespace pipetransformer::pipe {

namespace {

// On a worker, autograd must not hop to its own device threads: a node of the
// outer backward may be waiting there for this very cell.
void keep_backward_on_this_thread() {
  auto state = c10::AutogradState::get_tls_state();
  state.set_multithreading_enabled(false);
  c10::AutogradState::set_tls_state(state);
}

template <class T>
void append(std::vector<T>& all, const std::vector<T>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

const char* suffix_of(planner::OpKind kind) {
  return kind == planner::OpKind::kRecompute    ? "-recompute"
         : kind == planner::OpKind::kWeightGrad ? "-weights"
                                                : "";
}

}  // namespace

CellBackward::CellBackward(
    std::shared_ptr<PipeCall> call,
    std::shared_ptr<const BackwardPlan> plan,
    CallerContext context,
    bool keep_graph,
    std::shared_ptr<StageCasts> casts)
    : call_(std::move(call)),
      plan_(std::move(plan)),
      keep_graph_(keep_graph),
      context_(std::move(context)),
      casts_(std::move(casts)),
      borders_(call_->settings()),
      recomputed_(call_->num_cells()),
      weight_passes_(call_->num_cells()),
      parameter_grads_(call_->settings().num_stages),
      stage_marks_(call_->settings().num_stages) {}

void CellBackward::run(int32_t stage, const planner::Op& op) {
  const CellId id{stage, op.microbatch};
  switch (op.kind) {
    case planner::OpKind::kRecompute:
      recompute({id});
      break;
    case planner::OpKind::kBackward:
      backward_cell(id);
      break;
    case planner::OpKind::kInputGrad:
      input_grads(id);
      break;
    case planner::OpKind::kWeightGrad:
      weight_grads(id);
      break;
    case planner::OpKind::kForward:
      throw std::logic_error("pipe: forward in a backward; please report");
  }
}

Tensors CellBackward::run_autograd(
    const torch::autograd::edge_list& roots,
    const Tensors& root_grads,
    bool keep_graph,
    const torch::autograd::edge_list& wanted) {
  if (roots.empty() || wanted.empty()) {
    return Tensors(wanted.size());
  }
  if (roots.size() == 1) {
    // Autograd does not count a lone root among the nodes that it runs, and
    // hooks of layers ask (torch.autograd.graph.register_multi_grad_hook).
    return run_autograd(
        {roots[0], torch::autograd::Edge()},
        {root_grads[0], root_grads[0]},
        keep_graph,
        wanted);
  }
  try {
    return torch::autograd::Engine::get_default_engine().execute(
        roots,
        root_grads,
        keep_graph,
        /*create_graph=*/false,
        /*accumulate_grad=*/false,
        wanted);
  } catch (...) {
    call_->stages().forget_failure();
    throw;
  }
}

CellBackward::Open CellBackward::open(CellId id, bool takes_grads) {
  Open open;
  open.id = id;
  if (call_->checkpointed(id)) {
    open.cell = std::move(recomputed_[call_->index_of(id)]);
  } else if (keep_graph_) {
    open.cell = call_->cell(id);
  } else {
    open.cell = std::move(call_->cell(id));
  }
  if (!keep_graph_) {
    call_->cell(id) = Cell();
  }
  Tensors output_grads;
  if (takes_grads) {
    output_grads = borders_.take_output_grads(id, open.cell.output_edges);
  }
  for (std::size_t p = 0; p < output_grads.size(); ++p) {
    if (output_grads[p].defined()) {
      open.ends.outputs.push_back(open.cell.output_edges[p]);
      open.grads.push_back(std::move(output_grads[p]));
    }
  }
  for (const auto& edge : open.cell.input_edges) {
    if (edge.is_valid()) {
      open.ends.inputs.push_back(edge);
    }
  }
  return open;
}

void CellBackward::recompute(const std::vector<CellId>& ids) {
  if (CellRange::wanted()) {  // by this thread, not by that of the forward
    for (const CellId id : ids) {
      const CellRange range(id, suffix_of(planner::OpKind::kRecompute));
      const CallerScope caller(call_->context());
      call_->recompute_cell(id, recomputed_, *casts_);
    }
    return;
  }
  const CallerScope caller(call_->context());
  for (const CellId id : ids) {
    call_->recompute_cell(id, recomputed_, *casts_);
  }
}

void CellBackward::backward_cell(CellId id) {
  const CellRange range(id, suffix_of(planner::OpKind::kBackward));
  const CellScope scope(
      context_,
      call_->settings().devices[id.stage],
      call_->streams().own_stream(id.stage));
  keep_backward_on_this_thread();
  const Open cell = open(id, /*takes_grads=*/true);
  const torch::autograd::edge_list& parameters = plan_->parameters[id.stage];
  torch::autograd::edge_list wanted = parameters;
  append(wanted, cell.ends.inputs);
  Tensors found =
      run_autograd(cell.ends.outputs, cell.grads, keep_graph_, wanted);
  const auto middle =
      found.begin() + static_cast<std::ptrdiff_t>(parameters.size());
  Tensors input_grads(
      std::make_move_iterator(middle), std::make_move_iterator(found.end()));
  found.resize(parameters.size());
  add_parameter_grads(id.stage, found);
  hand_down(id, cell.cell, std::move(input_grads));
}

bool CellBackward::linked() const {
  return call_->settings().linked;
}

// Note [One call for a column]
// The cells of a micro-batch are linked at their borders, so one call of
// autograd runs them all: from the outputs of the last stage to the parameters
// of every stage and the inputs of the first. The call itself costs as much as
// the backward of a small layer or two. Nodes run in the reverse order of their
// forward, so where nothing is recomputed between them, one call also runs all
// micro-batches: autograd adds up what arrives at a parameter one by one, by
// micro-batch as the lists do. That is the sum of cell by cell as long as one
// edge of a micro-batch leads to a parameter. Where two do (a weight that a
// stage uses twice), cell by cell has (a1 + a2) + (b1 + b2), and one call would
// have ((a1 + a2) + b1) + b2: there a call runs one micro-batch, unless
// micro-batches share a graph, which the first call would free
// (parametrize.cached(), which goes with one dispatcher alone). A parameter of
// several stages is added up by micro-batch here, and by stage cell by cell.
void CellBackward::run_column(const std::vector<CellId>& ids) {
  const CellScope scope(context_, c10::kCPU, std::nullopt);
  keep_backward_on_this_thread();
  std::deque<CellRange> ranges;  // one within the other
  for (const CellId id : ids) {
    if (CellRange::wanted()) {
      ranges.emplace_back(id, suffix_of(planner::OpKind::kBackward));
    }
  }
  const int32_t last = call_->settings().num_stages - 1;
  std::vector<Open> cells;
  cells.reserve(ids.size());
  torch::autograd::edge_list roots;
  Tensors root_grads;
  torch::autograd::edge_list wanted;
  std::unordered_set<const torch::autograd::Node*> seen;
  // By parameter: the first stage that has it. They are leaves here.
  std::vector<bool> taken;
  for (int32_t j = plan_->first_stage; j <= last; ++j) {
    for (const auto& edge : plan_->parameters[j]) {
      taken.push_back(seen.insert(edge.function.get()).second);
      if (taken.back()) {
        wanted.push_back(edge);
      }
    }
  }
  for (const CellId id : ids) {
    const Open& cell = cells.emplace_back(open(id, id.stage == last));
    append(roots, cell.ends.outputs);
    append(root_grads, cell.grads);
    if (id.stage == plan_->first_stage) {
      append(wanted, cell.ends.inputs);
    }
  }
  Tensors found = run_autograd(roots, root_grads, keep_graph_, wanted);
  auto next = found.begin();
  auto is_taken = taken.begin();
  for (int32_t j = plan_->first_stage; j <= last; ++j) {
    Tensors grads;
    for (std::size_t p = 0; p < plan_->parameters[j].size(); ++p) {
      grads.push_back(*is_taken++ ? std::move(*next++) : at::Tensor());
    }
    add_parameter_grads(j, grads);
  }
  for (const Open& cell : cells) {
    if (cell.id.stage == plan_->first_stage) {
      const auto end =
          next + static_cast<std::ptrdiff_t>(cell.ends.inputs.size());
      hand_down(
          cell.id,
          cell.cell,
          Tensors(std::make_move_iterator(next), std::make_move_iterator(end)));
      next = end;
    }
  }
}

void CellBackward::run_together(
    const std::vector<Execution::OpOfStage>& group) {
  std::vector<CellId> again;
  std::vector<CellId> column;
  for (const auto& [stage, op] : group) {
    const bool recomputes = op->kind == planner::OpKind::kRecompute;
    (recomputes ? again : column).push_back({stage, op->microbatch});
  }
  recompute(again);
  run_column(column);
}

void CellBackward::input_grads(CellId id) {
  const CellRange range(id, suffix_of(planner::OpKind::kInputGrad));
  const CellScope scope(
      context_,
      call_->settings().devices[id.stage],
      call_->streams().own_stream(id.stage));
  keep_backward_on_this_thread();
  Open cell = open(id, /*takes_grads=*/true);
  cell.ends.parameters = plan_->parameters[id.stage];
  hand_down(id, cell.cell, split_cell(id, cell.ends, cell.grads));
}

Tensors CellBackward::split_cell(
    CellId id,
    const GraphEnds& ends,
    const Tensors& output_grads) {
  std::optional<BackwardSplit> split = BackwardSplit::make(ends);
  torch::autograd::edge_list wanted = ends.inputs;
  const torch::autograd::edge_list& others =
      split ? split->captures() : ends.parameters;
  wanted.insert(wanted.end(), others.begin(), others.end());
  Tensors found = run_autograd(
      ends.outputs, output_grads, /*keep_graph=*/split.has_value(), wanted);
  const auto middle =
      found.begin() + static_cast<std::ptrdiff_t>(ends.inputs.size());
  Tensors rest(
      std::make_move_iterator(middle), std::make_move_iterator(found.end()));
  found.resize(ends.inputs.size());
  if (split) {
    weight_passes_[call_->index_of(id)] =
        split->finish(std::move(rest), ends.outputs, output_grads);
  } else {
    add_parameter_grads(id.stage, rest);
  }
  return found;
}

void CellBackward::weight_grads(CellId id) {
  const CellRange range(id, suffix_of(planner::OpKind::kWeightGrad));
  const CellScope scope(
      context_,
      call_->settings().devices[id.stage],
      call_->streams().own_stream(id.stage));
  keep_backward_on_this_thread();
  const WeightPass pass = std::move(weight_passes_[call_->index_of(id)]);
  add_parameter_grads(
      id.stage,
      run_autograd(
          pass.roots,
          pass.grads,
          /*keep_graph=*/false,
          plan_->parameters[id.stage]));
  stage_marks_[id.stage] =
      call_->streams().mark(call_->settings().devices[id.stage]);
}

void CellBackward::hand_down(CellId id, const Cell& cell, Tensors grads) {
  stage_marks_[id.stage] = borders_.hand_down(
      id, cell.input_edges, cell.input_devices, std::move(grads));
}

void CellBackward::add_parameter_grads(int32_t stage, const Tensors& grads) {
  Tensors& sums = parameter_grads_[stage];
  sums.resize(grads.size());
  for (std::size_t p = 0; p < grads.size(); ++p) {
    add_to(sums[p], grads[p]);
  }
}

Tensors CellBackward::take_parameter_grads(int32_t stage) {
  Tensors grads = std::move(parameter_grads_[stage]);
  grads.resize(plan_->parameters[stage].size());
  for (at::Tensor& grad : grads) {
    if (grad.defined()) {
      grad = call_->streams().bring(grad, grad.device(), stage_marks_[stage]);
    }
  }
  return grads;
}

}  // namespace pipetransformer::pipe
