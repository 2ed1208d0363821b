#include "pipe/backward_run.h"

#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/engine.h>

namespace pipetransformer::pipe {

namespace {

// On a worker, autograd must not hop to its own device threads: a node of the
// outer backward may be waiting there for this very cell.
void keep_backward_on_this_thread() {
  auto state = c10::AutogradState::get_tls_state();
  state.set_multithreading_enabled(false);
  c10::AutogradState::set_tls_state(state);
}

bool owned_alone(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.use_count() == 1 &&
         tensor.has_storage() && tensor.storage().use_count() == 1 &&
         tensor.is_non_overlapping_and_dense();
}

void add_to(at::Tensor& sum, const at::Tensor& grad) {
  if (!grad.defined()) {
    return;
  }
  if (!sum.defined()) {
    sum = grad;
  } else if (owned_alone(sum) && sum.scalar_type() == grad.scalar_type()) {
    sum.add_(grad);
  } else if (sum.layout() == at::kStrided) {
    sum = sum.add(grad);
  } else {
    sum = grad.add(sum);  // sparse + dense is only defined this way round
  }
}

}  // namespace

BackwardRun::BackwardRun(
    std::shared_ptr<PipeCall> call,
    std::shared_ptr<const BackwardPlan> plan,
    std::vector<Tensors> output_grads,
    bool keep_graph)
    : call_(std::move(call)),
      plan_(std::move(plan)),
      keep_graph_(keep_graph),
      context_(CallerContext::with_streams_of(call_->context())),
      held_hooks_(plan_->parameters),
      grads_(std::move(output_grads)),
      grad_marks_(
          grads_.size(),
          call_->streams().mark(call_->settings().devices.back())),
      grad_devices_(grads_.size()),
      recomputed_(call_->settings().num_stages),
      parameter_grads_(call_->settings().num_stages),
      stage_marks_(call_->settings().num_stages) {
  call_->streams().begin();
}

BackwardRun::~BackwardRun() {
  if (execution_ != nullptr) {
    execution_->cancel();  // nobody is left to take the results
  }
}

void BackwardRun::start(WorkerPool& pool) {
  const CallSettings& settings = call_->settings();
  if (settings.num_checkpointed > 0) {
    check_workers_can_draw(settings.keyed_draws);
  }
  execution_ = Execution::start(
      pool,
      gpipe_backward(
          settings.num_microbatches,
          settings.num_stages,
          settings.num_checkpointed,
          plan_->first_stage),
      [self = weak_from_this()](int32_t stage, const Op& op) {
        if (const auto run = self.lock()) {
          run->run(stage, op);
        }
      });
}

void BackwardRun::wait_stage(int32_t stage) {
  try {
    execution_->wait_stage(stage, [this] { call_->stages().poll(); });
  } catch (...) {  // every running call has ended
    clean_up();
    throw;
  }
}

void BackwardRun::wait_all() {
  try {
    execution_->wait_all([this] { call_->stages().poll(); });
  } catch (...) {
    clean_up();
    throw;
  }
}

void BackwardRun::clean_up() {
  held_hooks_.restore_all();
  call_->streams().join();
}

void BackwardRun::run(int32_t stage, const Op& op) {
  const CellId id{stage, op.microbatch};
  if (op.kind == OpKind::kRecompute) {
    call_->recompute_cell(id, recomputed_[stage]);
  } else {
    backward_cell(id);
    if (id.microbatch == 0) {
      held_hooks_.restore(stage);  // GPipe ends every stage with micro-batch 0
    }
  }
}

Tensors BackwardRun::run_autograd(
    const torch::autograd::edge_list& roots,
    const Tensors& root_grads,
    bool keep_graph,
    const torch::autograd::edge_list& wanted) {
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

void BackwardRun::backward_cell(CellId id) {
  const CallSettings& settings = call_->settings();
  const bool checkpointed = id.microbatch < settings.num_checkpointed;
  Cell recomputed;
  if (checkpointed) {
    recomputed = std::move(recomputed_[id.stage]);
  }
  Cell& kept = call_->cell(id);
  Cell& cell = checkpointed ? recomputed : kept;

  const ContextScope context(
      context_,
      settings.devices[id.stage],
      call_->streams().own_stream(id.stage),
      /*shared_casts=*/true);
  keep_backward_on_this_thread();

  const Tensors output_grads = std::move(grads_[id.microbatch]);
  torch::autograd::edge_list roots;
  Tensors root_grads;
  for (std::size_t p = 0; p < cell.output_edges.size(); ++p) {
    // A stage above that detaches everything hands down no gradient at all.
    const bool arrives = p < output_grads.size() && output_grads[p].defined();
    if (arrives && cell.output_edges[p].is_valid()) {
      const auto& [node, input] = cell.output_edges[p];
      roots.push_back(cell.output_edges[p]);
      root_grads.push_back(call_->streams().bring(
          output_grads[p],
          node->input_metadata(input).device(),
          grad_marks_[id.microbatch]));
    }
  }
  torch::autograd::edge_list wanted = plan_->parameters[id.stage];
  const std::size_t num_parameters = wanted.size();
  for (const auto& edge : cell.input_edges) {
    if (edge.is_valid()) {
      wanted.push_back(edge);
    }
  }
  Tensors found(wanted.size());
  if (!roots.empty() && !wanted.empty()) {
    found =
        run_autograd(roots, root_grads, keep_graph_ && !checkpointed, wanted);
  }
  Tensors input_grads(cell.input_edges.size());
  std::size_t next = num_parameters;
  for (std::size_t p = 0; p < input_grads.size(); ++p) {
    if (cell.input_edges[p].is_valid()) {
      input_grads[p] = std::move(found[next++]);
    }
  }
  found.resize(num_parameters);
  add_parameter_grads(id.stage, found);
  grads_[id.microbatch] = std::move(input_grads);
  grad_devices_[id.microbatch] = std::move(cell.input_devices);
  grad_marks_[id.microbatch] = stage_marks_[id.stage] =
      call_->streams().mark(settings.devices[id.stage]);
  if (!keep_graph_) {
    kept = Cell();
  }
}

void BackwardRun::add_parameter_grads(int32_t stage, const Tensors& grads) {
  Tensors& sums = parameter_grads_[stage];
  sums.resize(grads.size());
  for (std::size_t p = 0; p < grads.size(); ++p) {
    add_to(sums[p], grads[p]);
  }
}

Tensors BackwardRun::take_parameter_grads(int32_t stage) {
  Tensors grads = std::move(parameter_grads_[stage]);
  grads.resize(plan_->parameters[stage].size());
  for (at::Tensor& grad : grads) {
    if (grad.defined()) {
      grad = call_->streams().bring(grad, grad.device(), stage_marks_[stage]);
    }
  }
  return grads;
}

std::vector<Tensors> BackwardRun::take_input_grads() {
  const device::Mark& ready = stage_marks_[plan_->first_stage];
  for (std::size_t i = 0; i < grads_.size(); ++i) {
    for (std::size_t p = 0; p < grads_[i].size(); ++p) {
      grads_[i][p] =
          call_->streams().bring(grads_[i][p], grad_devices_[i][p], ready);
    }
  }
  return std::move(grads_);
}

}  // namespace pipetransformer::pipe
