#include "pipe/weight_casts.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/to_ops.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "pipe/cut_off.h"
#include "pipe/node_ptr.h"

namespace pipetransformer::pipe {

// Note [One cast for all micro-batches]
// Cells keep out of torch's table of casts, so autocast's kernels call
// weight.to(dtype) for each use. We register a kernel for that operation under
// a dispatch key that is otherwise unused, and include the key on a thread for
// as long as it runs a cell under autocast; elsewhere nothing changes and
// nothing is paid. The kernel tells autocast's own calls from a layer's:
// autocast was on when the cell began, no region was entered since, and yet it
// is off now, as only inside autocast's kernels. For a weight (what torch would
// put in its table) it gives the data of the first cast, with a history of its
// own. All share the version counter, so a change in place fails in backward.

namespace {

constexpr c10::DispatchKey kCastKey =
    c10::DispatchKey::TESTING_ONLY_GenericWrapper;

thread_local const WeightCastScope::State* casts_of_thread = nullptr;

// The backward of a cast.
struct CastNode : torch::autograd::Node {
  torch::autograd::variable_list
  apply(torch::autograd::variable_list&& grads) override {
    return {grads[0].defined() ? grads[0].to(at::kFloat) : at::Tensor()};
  }
  std::string name() const override {
    return "PipeWeightCast";
  }
};

int autocast_nesting() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

// What torch would keep in its table, apart from tensors of other kinds.
bool is_weight(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.requires_grad() &&
         tensor.is_leaf() && !tensor.is_view() && !tensor.is_inference() &&
         tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

// The call comes from autocast's own kernels.
bool asked_by_autocast(
    const WeightCastScope::State& state,
    c10::DeviceType device,
    at::ScalarType dtype) {
  if (!at::autocast::is_autocast_available(device)) {
    return false;
  }
  const c10::DispatchKey key =
      at::autocast::get_autocast_dispatch_key_from_device_type(device);
  return !state.excluded.has(key) &&
         c10::impl::tls_is_dispatch_key_excluded(key) &&
         at::autocast::get_autocast_dtype(device) == dtype &&
         autocast_nesting() == state.nesting;
}

// Somebody watches the operations, or changes what they mean.
bool is_traced() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         c10::impl::tls_is_dispatch_key_included(
             c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

at::Tensor to_dtype(
    c10::DispatchKeySet keys,
    const at::Tensor& self,
    at::ScalarType dtype,
    bool non_blocking,
    bool copy,
    std::optional<at::MemoryFormat> format) {
  const auto call_on = [&] {
    const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kCastKey);
    return at::_ops::to_dtype::redispatch(
        keys & below, self, dtype, non_blocking, copy, format);
  };
  const WeightCastScope::State* const state = casts_of_thread;
  if (state == nullptr || non_blocking || copy || format.has_value() ||
      !is_weight(self) ||
      !asked_by_autocast(*state, self.device().type(), dtype) || is_traced() ||
      c10::InferenceMode::is_enabled() ||
      !state->casts->takes(self, state->weights)) {
    return call_on();
  }
  at::Tensor cast = state->casts->get(self, dtype, call_on);
  if (c10::GradMode::is_enabled()) {
    const NodePtr node = make_node<CastNode>();
    node->add_next_edge(torch::autograd::impl::gradient_edge(self));
    torch::autograd::set_history(cast, node);
  }
  return cast;
}

bool register_kernel() {
  try {
    // They live as long as the process.
    static torch::Library all(
        torch::Library::IMPL, "_", kCastKey, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFallthrough());
    static torch::Library aten(
        torch::Library::IMPL, "aten", kCastKey, __FILE__, __LINE__);
    aten.impl("to.dtype", TORCH_FN(to_dtype));
    return true;
  } catch (const std::exception& error) {
    TORCH_WARN(
        "pipe: casts of weights cannot be shared with this torch, "
        "micro-batches "
        "under autocast will make their own: ",
        error.what());
    return false;
  }
}

}  // namespace

bool WeightCasts::takes(
    const at::Tensor& tensor,
    const torch::autograd::edge_list* weights) const {
  if (weights == nullptr || casts_.count(tensor.unsafeGetTensorImpl()) > 0) {
    return true;
  }
  const NodePtr node = torch::autograd::impl::try_get_grad_accumulator(tensor);
  return node != nullptr &&
         std::any_of(weights->begin(), weights->end(), [&](const auto& weight) {
           return weight.function == node;
         });
}

at::Tensor WeightCasts::get(
    const at::Tensor& weight,
    at::ScalarType dtype,
    const std::function<at::Tensor()>& make) {
  Cast& kept = casts_[weight.unsafeGetTensorImpl()];
  const int64_t version = weight._version();
  const bool serves =
      kept.value.defined() && kept.value.scalar_type() == dtype &&
      kept.version == version && kept.offset == weight.storage_offset() &&
      kept.storage.is_alias_of(weight.storage()) &&
      kept.value.sizes() == weight.sizes();
  if (!serves) {
    const c10::NoGradGuard no_grad;
    kept = {weight, weight.storage(), weight.storage_offset(), version, make()};
  }
  return cut_off(kept.value);
}

bool WeightCastScope::available() {
  static const bool registered = register_kernel();
  return registered;
}

bool WeightCastScope::wanted(const std::vector<c10::Device>& devices) {
  const auto casts = [](c10::Device device) {
    return at::autocast::is_autocast_available(device.type()) &&
           at::autocast::is_autocast_enabled(device.type());
  };
  return at::autocast::is_autocast_cache_enabled() &&
         std::any_of(devices.begin(), devices.end(), casts);
}

WeightCastScope::WeightCastScope(
    WeightCasts& casts,
    const torch::autograd::edge_list* weights)
    : include_(kCastKey),
      state_{
          &casts,
          weights,
          c10::impl::tls_local_dispatch_key_set().excluded_,
          autocast_nesting()},
      previous_(std::exchange(casts_of_thread, &state_)) {}

WeightCastScope::~WeightCastScope() {
  casts_of_thread = previous_;
}

}  // namespace pipetransformer::pipe
