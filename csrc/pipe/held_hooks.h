// Sets the hooks of parameters aside (`tensor.register_hook`) while cells run.
//
// Autograd calls them wherever a gradient of the parameter is asked for, so in
// every cell; but they are meant for the whole gradient, which the stage's node
// delivers once. A stage's worker puts its hooks back after its last cell, so
// also when nobody waits for the rest of a backward that has failed elsewhere.
// Where one backward goes through several calls of a pipe, their runs may
// overlap (the nodes of an accelerator's outputs are in a queue of their own):
// hooks come back with the last of them. Thread safety: stages are restored by
// different threads; restore_all() needs that no cell runs any more.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "pipe/node_ptr.h"

namespace pipetransformer::pipe {

class HeldHooks {
 public:
  // `parameters`: by stage. A parameter of several stages gets its hooks back
  // with the lowest one, whose cells run last.
  explicit HeldHooks(const std::vector<torch::autograd::edge_list>& parameters);
  ~HeldHooks();
  HeldHooks(const HeldHooks&) = delete;
  HeldHooks& operator=(const HeldHooks&) = delete;

  void restore(int32_t stage);
  void restore_all();

 private:
  struct Held {
    NodePtr node;
    int32_t stage;
    bool is_held = true;
  };
  static void give_back(Held& held);

  std::vector<Held> held_;
};

}  // namespace pipetransformer::pipe
