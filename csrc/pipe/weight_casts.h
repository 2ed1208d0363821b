// Casts of weights that autocast asks for, made once per stage and run instead
// of once per micro-batch. Saves time and memory only: every use still has a
// history of its own, so values and gradients have the bits they have without
// it; except for a weight that a layer changes through its .data, in place,
// which leaves no trace. See Note [Casts of a cell] in context.h and Note [One
// cast for all micro-batches] in weight_casts.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

namespace pipetransformer::pipe {

// The casts of one stage. Not locked: one thread at a time uses them, on one
// stream. Owns its tensors until clear().
class WeightCasts {
 public:
  // Whether it keeps casts of this tensor: of one of the weights alone, unless
  // they are not known (null). Other leaves, which a layer makes for the length
  // of a call, would be held for all micro-batches.
  bool takes(
      const at::Tensor& tensor,
      const torch::autograd::edge_list* weights) const;

  // The kept cast of a weight, or what `make` gives; `make` runs where
  // gradients are not recorded. A weight that was changed or given other data
  // since is cast anew. The result has no history.
  at::Tensor
  get(const at::Tensor& weight,
      at::ScalarType dtype,
      const std::function<at::Tensor()>& make);

  void clear() noexcept {
    casts_.clear();
  }

 private:
  struct Cast {
    at::Tensor weight;
    // What it was cast from: held, so that nothing else gets its address.
    c10::Storage storage;
    int64_t offset = 0;
    int64_t version = 0;
    at::Tensor value;
  };
  std::unordered_map<const c10::TensorImpl*, Cast> casts_;
};

// By stage; empty where none are to be shared.
using StageCasts = std::vector<WeightCasts>;

// While it lives, casts of weights on this thread are taken from `casts`: those
// of the autocast that is on where it is made, in no region within.
class WeightCastScope {
 public:
  // `weights`: of the stage, those that require grad; null: not known, as
  // where nothing is recorded. They must outlive the scope.
  WeightCastScope(
      WeightCasts& casts,
      const torch::autograd::edge_list* weights);
  ~WeightCastScope();
  WeightCastScope(const WeightCastScope&) = delete;
  WeightCastScope& operator=(const WeightCastScope&) = delete;

  // Registers the mechanism once per process; false, with a warning, where this
  // torch refuses it. Make no scope then.
  static bool available();

  // The calling thread's autocast is on for a device of `devices`, and keeps
  // casts: what its cells do may be shared.
  static bool wanted(const std::vector<c10::Device>& devices);

  struct State {
    WeightCasts* casts = nullptr;
    const torch::autograd::edge_list* weights = nullptr;
    c10::DispatchKeySet excluded;  // autocast is off where its key is in it
    int nesting = 0;               // of autocast regions
  };

 private:
  const c10::impl::IncludeDispatchKeyGuard include_;
  const State state_;
  const State* const previous_;
};

}  // namespace pipetransformer::pipe
