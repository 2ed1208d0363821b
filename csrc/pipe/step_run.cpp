#include "pipe/step_run.h"

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <utility>

#include "pipe/cell_checks.h"
#include "pipe/held_hooks.h"

namespace pipetransformer::pipe {

namespace {

using torch::autograd::variable_list;

// The gradients of a step, until they are delivered.
struct Delivery {
  std::vector<Tensors> parameter_grads;  // by stage
  Tensors input_grads;
  // Gradients were ready on, and the scale arrived on, other streams than the
  // current ones of the thread that delivers, perhaps.
  std::shared_ptr<device::PipelineStreams> streams;
  std::vector<device::Mark> marks;  // by stage
  at::Tensor scale;
  device::Mark scale_mark;
  bool keep = false;
  bool used_up = false;
};

// The scale of one stage's gradients on each of their devices: brought there
// once, not for each gradient.
using Factors = std::unordered_map<c10::Device, at::Tensor>;

// Multiplies where it changes anything; a kept gradient is copied, since
// autograd may hand it on without a copy.
at::Tensor scaled(
    const at::Tensor& ready,
    const device::Mark& mark,
    const Delivery& delivery,
    Factors& factors) {
  if (!ready.defined() || !delivery.scale.defined()) {
    return {};  // nothing has arrived, or none is wanted
  }
  const at::Tensor grad = delivery.streams->bring(ready, ready.device(), mark);
  const at::Tensor& scale = delivery.scale;
  // With is_grads_batched there are several, and they have no one value.
  if (scale.is_cpu() && !is_transformed(scale) && scale.item<double>() == 1.0) {
    return delivery.keep ? grad.clone() : grad;
  }
  at::Tensor& factor = factors[grad.device()];
  if (!factor.defined()) {
    factor = delivery.streams->bring(scale, grad.device(), delivery.scale_mark);
  }
  return grad.mul(factor).to(grad.scalar_type());
}

class LossNode : public torch::autograd::Node {
 public:
  explicit LossNode(std::shared_ptr<Delivery> delivery)
      : delivery_(std::move(delivery)) {}

  variable_list apply(variable_list&& grads) override {
    refuse_double_backward();
    if (delivery_->used_up) {
      refuse_second_backward();
    }
    delivery_->keep = torch::autograd::get_current_graph_task_keep_graph();
    delivery_->used_up = !delivery_->keep;
    delivery_->scale = grads[0];
    if (grads[0].defined()) {
      delivery_->scale_mark = delivery_->streams->mark(grads[0].device());
    }
    return {make_token()};
  }
  std::string name() const override {
    return "PipeLoss";
  }

 private:
  const std::shared_ptr<Delivery> delivery_;
};

class DeliveryNode : public torch::autograd::Node {
 public:
  DeliveryNode(std::shared_ptr<Delivery> delivery, int32_t stage, bool lowest)
      : delivery_(std::move(delivery)), stage_(stage), lowest_(lowest) {}

  variable_list apply(variable_list&& /*token*/) override {
    variable_list results;
    if (!lowest_) {
      results.push_back(make_token());
    }
    Factors factors;
    const device::Mark& mark = delivery_->marks[stage_];
    deliver(delivery_->parameter_grads[stage_], mark, factors, results);
    if (lowest_) {
      deliver(delivery_->input_grads, mark, factors, results);
    }
    return results;
  }
  std::string name() const override {
    return "PipeDelivery" + std::to_string(stage_);
  }

 private:
  void deliver(
      Tensors& grads,
      const device::Mark& mark,
      Factors& factors,
      variable_list& results) {
    for (at::Tensor& grad : grads) {
      results.push_back(scaled(grad, mark, *delivery_, factors));
      if (!delivery_->keep) {
        grad.reset();
      }
    }
  }

  const std::shared_ptr<Delivery> delivery_;
  const int32_t stage_;
  const bool lowest_;
};

}  // namespace

StepRun::StepRun(
    std::shared_ptr<PipeCall> call,
    std::shared_ptr<const BackwardPlan> plan,
    std::vector<double> weights)
    : call_(std::move(call)),
      plan_(std::move(plan)),
      weights_(std::move(weights)),
      cells_(
          call_,
          plan_,
          CallerContext::for_backward_of(call_->context()),
          /*keep_graph=*/false,
          call_->casts()) {}

void StepRun::run(WorkerPool& pool, std::shared_ptr<const Schedule> schedule) {
  // Put back at the end: a parameter of two stages may be in use until then.
  const HeldHooks held_hooks(plan_->parameters);
  const auto execution = Execution::start(
      pool,
      std::move(schedule),
      call_->settings().dispatch,
      {.run = [this](int32_t stage, const Op& op) { run_op(stage, op); },
       .enter = [this]() -> std::shared_ptr<void> {
         return call_->settings().dispatch == Dispatch::kHere
                    ? nullptr
                    : call_->stages().enter_backward();
       }});
  try {
    execution->wait_all([this] { call_->stages().poll(); });
  } catch (...) {
    call_->finish();
    throw;
  }
  call_->finish();
}

void StepRun::run_op(int32_t stage, const Op& op) {
  const CellId id{stage, op.microbatch};
  if (op.kind == OpKind::kForward) {
    const CallerScope caller(call_->context());
    call_->forward_cell(id);
    return;
  }
  const CallerScope caller(cells_.context());
  const CallSettings& settings = call_->settings();
  const bool starts =
      op.kind == OpKind::kBackward || op.kind == OpKind::kInputGrad;
  if (starts && stage + 1 == settings.num_stages) {
    const CellScope scope(
        cells_.context(),
        settings.devices[stage],
        settings.streams->own_stream(stage));
    const c10::NoGradGuard no_grad;
    const at::Tensor& loss = call_->output(id.microbatch).front().value;
    cells_.set_output_grads(
        id.microbatch,
        {at::full(loss.sizes(), weights_[id.microbatch], loss.options())},
        device::Mark());
  }
  cells_.run(stage, op);
}

at::Tensor mean_loss(PipeCall& call, const std::vector<double>& weights) {
  const c10::NoGradGuard no_grad;
  at::Tensor sum;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& loss = call.output(static_cast<int32_t>(i)).front().value;
    const at::Tensor part =
        weights[i] == 1.0 ? loss.detach().clone() : loss.mul(weights[i]);
    sum = sum.defined() ? sum.add(part) : part;
  }
  return sum;
}

at::Tensor
connect_step(const at::Tensor& loss, StepRun& run, const ChainPlan& plan) {
  const c10::NoGradGuard no_grad;
  const auto delivery = std::make_shared<Delivery>();
  const CallSettings& settings = run.settings();
  delivery->streams = settings.streams;
  const auto num_stages =
      static_cast<int32_t>(plan.backward->parameters.size());
  for (int32_t j = 0; j < num_stages; ++j) {
    delivery->parameter_grads.push_back(run.cells().take_parameter_grads(j));
  }
  const std::vector<Tensors> grads = run.cells().take_input_grads();
  for (std::size_t k = 0; k < plan.inputs.positions.size(); ++k) {
    delivery->input_grads.push_back(
        gather_grads(grads, plan.inputs.positions[k], plan.inputs.rows[k]));
  }
  for (const c10::Device& device : settings.devices) {  // all is written
    delivery->marks.push_back(settings.streams->mark(device));
  }
  const at::Tensor token =
      chain_nodes(plan, [&](int32_t stage, bool lowest) -> NodePtr {
        return make_node<DeliveryNode>(delivery, stage, lowest);
      });
  const NodePtr node = make_node<LossNode>(delivery);
  node->set_next_edges({torch::autograd::impl::gradient_edge(token)});
  return with_history(loss, node);
}

}  // namespace pipetransformer::pipe
