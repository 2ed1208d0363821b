// Owning pointer to an autograd node: torch 2.13 counts nodes intrusively,
// earlier ones through std::shared_ptr.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace pipetransformer::pipe {

using NodePtr = decltype(torch::autograd::Edge::function);

template <class T, class Pointer = NodePtr, class... Args>
Pointer make_node(Args&&... args) {
  if constexpr (std::is_same_v<
                    Pointer,
                    std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<T>(std::forward<Args>(args)...);
  } else {
    return Pointer(c10::make_intrusive<T>(std::forward<Args>(args)...));
  }
}

}  // namespace pipetransformer::pipe
