// Python's context variables on the threads that work for a caller.
//
// Note [Context variables]
// A context is entered by one thread at a time, so each thread and each call
// has a copy, which shares its values; what a layer sets in its copy goes with
// it. A layer sees the values that held when the pipe was called, in its
// recomputation as well. A node of the backward sees those of the thread that
// called backward: torch leaves their context in the thread-local data of every
// backward (under kKey), where the backward of a compiled layer enters it, and
// so each worker needs a copy there, too.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace pipetransformer::bindings {

// The context of this thread, a copy. Needs the GIL.
pybind11::object current_context();

// This thread is in a copy of `context` for as long as it lives. Needs the GIL.
class ContextScope {
 public:
  explicit ContextScope(const pybind11::object& context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  pybind11::object entered_;
};

// As ContextScope, in the context of the backward under way or, where there is
// none, in `context`; until what it returns is destroyed. Takes the GIL.
std::shared_ptr<void>
enter_backward_context(const pybind11::object& context) noexcept;

}  // namespace pipetransformer::bindings
