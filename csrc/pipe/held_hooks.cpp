#include "pipe/held_hooks.h"

#include <iterator>

namespace pipetransformer::pipe {

HeldHooks::HeldHooks(
    const std::vector<torch::autograd::edge_list>& parameters) {
  for (std::size_t j = 0; j < parameters.size(); ++j) {
    for (const auto& edge : parameters[j]) {
      auto& hooks = edge.function->tensor_pre_hooks();
      if (!hooks.empty()) {
        held_.push_back(
            {edge.function, static_cast<int32_t>(j), std::move(hooks)});
        hooks.clear();
      }
    }
  }
}

HeldHooks::~HeldHooks() {
  restore_all();
}

void HeldHooks::restore_all() {
  for (Held& held : held_) {
    put_back(held);
  }
}

void HeldHooks::restore(int32_t stage) {
  for (Held& held : held_) {
    if (held.stage == stage) {
      put_back(held);
    }
  }
}

void HeldHooks::put_back(Held& held) {
  auto& hooks = held.node->tensor_pre_hooks();
  hooks.insert(  // in front of those registered meanwhile
      hooks.begin(),
      std::make_move_iterator(held.hooks.begin()),
      std::make_move_iterator(held.hooks.end()));
  held.hooks.clear();
}

}  // namespace pipetransformer::pipe
