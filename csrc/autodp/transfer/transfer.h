// State transfer over an active group: tensors from one replica to all others,
// bit by bit.
//
// Thread-safe as far as the group is; blocks, so call it without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace pipetransformer::autodp {

// Overwrites `tensors` of every member with those of member `source`. They must
// agree in number, order, dtype and shape (checked against the source's layout
// first) and change their device at the same places; any strides, any dtype,
// 0-dim and empty ones too. Small tensors of one device travel together in
// buffers of at most `bucket_bytes`, large ones alone and, where their elements
// lie in order, without a copy; the next is packed while one is under way.
// Requires-grad leaves are written in place without a graph. Returns the bytes
// of the tensors.
//
// Calls `poll` every 100 ms while it waits for a member; what that throws (a
// signal handler, say) leaves the tensors half moved and the group in use.
//
// Throws c10::ValueError when the layouts differ or a tensor has no dense
// storage, PeerFailureError when the run fails.
int64_t broadcast_tensors(
    c10d::ProcessGroup& group,
    const std::vector<at::Tensor>& tensors,
    int64_t source,
    int64_t bucket_bytes,
    const std::function<void()>& poll);

}  // namespace pipetransformer::autodp
