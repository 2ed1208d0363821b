#include "pipe/held_hooks.h"

#include <iterator>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace pipetransformer::pipe {

namespace {

using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;

// What is set aside, by parameter. One backward may go through several calls of
// a pipe, whose cells run at the same time: the last of them puts hooks back.
class Aside {
 public:
  // False: the parameter has no hooks, and nobody has set any aside.
  bool take(torch::autograd::Node& node) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(&node);
    if (found != entries_.end()) {
      ++found->second.holders;
      return true;
    }
    auto& hooks = node.tensor_pre_hooks();
    if (hooks.empty()) {
      return false;
    }
    entries_[&node] = {1, std::move(hooks)};
    hooks.clear();
    return true;
  }

  void give_back(torch::autograd::Node& node) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(&node);
    if (--found->second.holders > 0) {
      return;
    }
    auto& hooks = node.tensor_pre_hooks();
    hooks.insert(  // in front of those registered meanwhile
        hooks.begin(),
        std::make_move_iterator(found->second.hooks.begin()),
        std::make_move_iterator(found->second.hooks.end()));
    entries_.erase(found);
  }

 private:
  struct Entry {
    int64_t holders = 0;
    Hooks hooks;
  };
  std::mutex mutex_;
  std::unordered_map<torch::autograd::Node*, Entry> entries_;
};

Aside& aside() {
  static auto& only = *new Aside;  // threads may use it at exit
  return only;
}

}  // namespace

HeldHooks::HeldHooks(
    const std::vector<torch::autograd::edge_list>& parameters) {
  for (std::size_t j = 0; j < parameters.size(); ++j) {
    for (const auto& edge : parameters[j]) {
      if (aside().take(*edge.function)) {
        held_.push_back({edge.function, static_cast<int32_t>(j)});
      }
    }
  }
}

HeldHooks::~HeldHooks() {
  restore_all();
}

void HeldHooks::restore_all() {
  for (Held& held : held_) {
    give_back(held);
  }
}

void HeldHooks::restore(int32_t stage) {
  for (Held& held : held_) {
    if (held.stage == stage) {
      give_back(held);
    }
  }
}

void HeldHooks::give_back(Held& held) {
  if (held.is_held) {
    held.is_held = false;
    aside().give_back(*held.node);
  }
}

}  // namespace pipetransformer::pipe
