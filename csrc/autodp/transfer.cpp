#include "autodp/transfer.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <string_view>

#include "autodp/active_group.h"
#include "core/hash.h"

namespace pipetransformer::autodp {

namespace {

constexpr std::chrono::milliseconds kSlice{100};

uint64_t hash_layout(const at::Tensor& tensor, uint64_t seed) {
  seed = core::hash_string(c10::toString(tensor.scalar_type()), seed);
  const auto sizes = tensor.sizes();
  return core::hash_bytes(sizes.data(), sizes.size() * sizeof(int64_t), seed);
}

// The tensor's elements as a flat byte tensor; shares memory when it can.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.detach().contiguous().reshape({-1}).view(at::kByte);
}

void broadcast(
    c10d::ProcessGroup& group,
    at::Tensor& tensor,
    int64_t source,
    const std::function<void()>& poll) {
  c10d::BroadcastOptions options;
  options.rootRank = source;
  std::vector<at::Tensor> tensors{tensor};
  const auto work = group.broadcast(tensors, options);
  while (!wait_done(*work, kSlice)) {
    poll();
  }
  work->wait();
}

void check_layout(
    c10d::ProcessGroup& group,
    const std::vector<at::Tensor>& tensors,
    int64_t source,
    const std::function<void()>& poll) {
  uint64_t hash = core::kHashSeed;
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(
        tensor.defined() && tensor.layout() == at::kStrided,
        "broadcast_tensors: expected dense tensors, got another layout");
    hash = hash_layout(tensor, hash);
  }
  const auto own = static_cast<int64_t>(hash);
  auto agreed = at::full({1}, own, at::kLong);
  const auto device =
      tensors.empty() ? at::Device(at::kCPU) : tensors.front().device();
  agreed = agreed.to(device);
  broadcast(group, agreed, source, poll);
  TORCH_CHECK_VALUE(
      agreed.item<int64_t>() == own,
      "broadcast_tensors: expected the dtypes and shapes of member ",
      source,
      ", got others in the ",
      tensors.size(),
      " tensors of member ",
      group.getRank());
}

// Sends tensors[begin, end), all of one device, as one buffer.
void broadcast_bucket(
    c10d::ProcessGroup& group,
    const std::vector<at::Tensor>& tensors,
    int64_t source,
    const std::function<void()>& poll) {
  std::vector<at::Tensor> pieces;
  pieces.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    pieces.push_back(as_bytes(tensor));
  }
  auto buffer = pieces.size() == 1 ? pieces.front() : at::cat(pieces);
  broadcast(group, buffer, source, poll);
  if (group.getRank() == source) {
    return;
  }
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
    // A clone of the slice starts aligned for any dtype.
    const auto bytes = buffer.narrow(0, offset, num_bytes).clone();
    tensor.detach().copy_(
        bytes.view(tensor.scalar_type()).view(tensor.sizes()));
    offset += num_bytes;
  }
}

}  // namespace

int64_t broadcast_tensors(
    c10d::ProcessGroup& group,
    const std::vector<at::Tensor>& tensors,
    int64_t source,
    int64_t bucket_bytes,
    const std::function<void()>& poll) {
  TORCH_CHECK_VALUE(
      source >= 0 && source < group.getSize(),
      "source: expected a member's index below ",
      group.getSize(),
      ", got ",
      source);
  TORCH_CHECK_VALUE(
      bucket_bytes > 0,
      "bucket_bytes: expected a positive number, got ",
      bucket_bytes);
  const c10::AutoGradMode no_grad(false);
  check_layout(group, tensors, source, poll);
  int64_t total_bytes = 0;
  int64_t held_bytes = 0;
  std::vector<at::Tensor> bucket;
  const auto flush = [&] {
    if (!bucket.empty()) {
      broadcast_bucket(group, bucket, source, poll);
      bucket.clear();
      held_bytes = 0;
    }
  };
  for (const auto& tensor : tensors) {
    const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
    if (num_bytes == 0) {
      continue;
    }
    if (!bucket.empty() && (held_bytes + num_bytes > bucket_bytes ||
                            bucket.front().device() != tensor.device())) {
      flush();
    }
    bucket.push_back(tensor);
    held_bytes += num_bytes;
    total_bytes += num_bytes;
  }
  flush();
  return total_bytes;
}

uint64_t hash_tensor(const at::Tensor& tensor) {
  const c10::AutoGradMode no_grad(false);
  const auto bytes = as_bytes(tensor.detach().cpu());
  return core::hash_bytes(
      bytes.const_data_ptr(),
      static_cast<size_t>(bytes.numel()),
      hash_layout(tensor, core::kHashSeed));
}

}  // namespace pipetransformer::autodp
