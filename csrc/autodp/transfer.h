// State transfer over an active group: tensors from one replica to all others,
// bit by bit, and their hashes for the comparison afterwards.
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
// first); any strides, any dtype, 0-dim and empty ones too. Tensors of one
// device are coalesced into buffers of at most `bucket_bytes`; a larger tensor
// travels alone. Requires-grad leaves are written in place without a graph.
// Returns the bytes of the tensors.
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

// 64-bit hash of dtype, shape and bits. Equal tensors have equal hashes on
// every rank, whatever their strides and device; 0.0 and -0.0 differ.
uint64_t hash_tensor(const at::Tensor& tensor);

}  // namespace pipetransformer::autodp
