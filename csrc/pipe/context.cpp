#include "pipe/context.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace pipetransformer::pipe {

CallerContext::CallerContext(const std::vector<c10::Device>& devices)
    : autograd_(c10::AutogradState::get_tls_state()) {
  for (const c10::Device& device : devices) {
    if (device.is_cpu() || device.is_meta()) {
      continue;
    }
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream stream = guard.getStream(device);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
      streams_.push_back(stream);
    }
  }
}

CallerContext CallerContext::with_streams_of(const CallerContext& other) {
  CallerContext context{std::vector<c10::Device>()};
  context.streams_ = other.streams_;
  return context;
}

CallerContext CallerContext::for_backward_of(const CallerContext& forward) {
  const c10::NoGradGuard no_grad;
  // As torch.autograd does it for the operations that must not be cast.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  return with_streams_of(forward);
}

CallerScope::CallerScope(const CallerContext& context)
    : state_(context.state_), streams_(context.streams_) {}

CellScope::CellScope(
    const CallerContext& context,
    c10::Device device,
    const std::optional<c10::Stream>& own_stream)
    : own_stream_(own_stream),
      previous_cache_(at::autocast::is_autocast_cache_enabled()),
      previous_keys_(c10::impl::tls_local_dispatch_key_set()) {
  c10::AutogradState::set_tls_state(context.autograd_);
  if (!device.is_cpu() && !device.is_meta()) {
    device_.reset_device(device);
  }
  at::autocast::set_autocast_cache_enabled(false);
}

CellScope::~CellScope() {
  c10::impl::_force_tls_local_dispatch_key_set(previous_keys_);
  at::autocast::set_autocast_cache_enabled(previous_cache_);
}

}  // namespace pipetransformer::pipe
