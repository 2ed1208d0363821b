#include "autodp/transfer/transfer.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <utility>

#include "autodp/groups/active_group.h"
#include "autodp/transfer/packing.h"
#include "autodp/transfer/tensor_hash.h"
#include "core/hash.h"

namespace pipetransformer::autodp {

namespace {

constexpr std::chrono::milliseconds kSlice{100};
// From this size on a tensor is sent alone: copying it into a buffer would cost
// more than a message of its own.
constexpr int64_t kAloneBytes = int64_t{256} << 10;
// Broadcasts that are started before the oldest is waited for.
constexpr size_t kUnderWay = 2;
void wait_for(c10d::Work& work, const std::function<void()>& poll) {
  while (!wait_done(work, kSlice)) {
    poll();
  }
  work.wait();
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
  const auto device =
      tensors.empty() ? at::Device(at::kCPU) : tensors.front().device();
  std::vector<at::Tensor> agreed{at::full({1}, own, at::kLong).to(device)};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  wait_for(*group.broadcast(agreed, options), poll);
  TORCH_CHECK_VALUE(
      agreed.front().item<int64_t>() == own,
      "broadcast_tensors: expected the dtypes and shapes of member ",
      source,
      ", got others in the ",
      tensors.size(),
      " tensors of member ",
      group.getRank());
}

// Sends tensors in the order in which they come, identically on all members.
class Transfer {
 public:
  Transfer(
      c10d::ProcessGroup& group,
      int64_t source,
      int64_t bucket_bytes,
      const std::function<void()>& poll)
      : group_(group),
        source_(source),
        bucket_bytes_(bucket_bytes),
        poll_(poll) {}

  // Large ones go at once; small ones with others.
  void add(const at::Tensor& tensor) {
    const auto num_bytes = padded_bytes(tensor);
    if (num_bytes >= std::min(kAloneBytes, bucket_bytes_)) {
      send_alone(tensor);
      return;
    }
    if (!held_.empty() && (held_bytes_ + num_bytes > bucket_bytes_ ||
                           held_.front().device() != tensor.device())) {
      flush();
    }
    held_.push_back(tensor);
    held_bytes_ += num_bytes;
  }

  void finish() {
    flush();
    while (!under_way_.empty()) {
      complete_oldest();
    }
  }

 private:
  struct Message {
    at::Tensor buffer;
    std::vector<at::Tensor> tensors;  // what it holds; none: memory of its own
    c10::intrusive_ptr<c10d::Work> work;
  };

  bool sends() const {
    return group_.getRank() == source_;
  }

  void send_alone(const at::Tensor& tensor) {
    const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
    if (is_flat(tensor)) {
      start(as_bytes(tensor), num_bytes, {});
      if (!sends()) {
        note_write(tensor);
      }
      return;
    }
    const auto options = tensor.options().dtype(at::kByte);
    auto buffer = at::empty({padded_bytes(tensor)}, options);
    if (sends()) {
      pack(tensor, buffer, 0);
    }
    start(std::move(buffer), num_bytes, {tensor});
  }

  void flush() {
    if (held_.empty()) {
      return;
    }
    auto buffer = take_buffer(held_.front().device());
    int64_t offset = 0;
    for (const auto& tensor : held_) {
      if (sends()) {
        pack(tensor, buffer, offset);
      }
      offset += padded_bytes(tensor);
    }
    start(std::move(buffer), offset, std::exchange(held_, {}));
    held_bytes_ = 0;
  }

  // Memory that was written before costs no page faults.
  at::Tensor take_buffer(at::Device device) {
    const auto fits = [&](const at::Tensor& buffer) {
      return buffer.device() == device && buffer.numel() == bucket_bytes_;
    };
    const auto found = std::find_if(free_.begin(), free_.end(), fits);
    if (found == free_.end()) {
      return at::empty({bucket_bytes_}, at::device(device).dtype(at::kByte));
    }
    auto buffer = *found;
    free_.erase(found);
    return buffer;
  }

  void
  start(at::Tensor buffer, int64_t num_bytes, std::vector<at::Tensor> tensors) {
    if (under_way_.size() >= kUnderWay) {
      complete_oldest();
    }
    c10d::BroadcastOptions options;
    options.rootRank = source_;
    std::vector<at::Tensor> sent{buffer.narrow(0, 0, num_bytes)};
    auto work = group_.broadcast(sent, options);
    under_way_.push_back(
        {std::move(buffer), std::move(tensors), std::move(work)});
  }

  void complete_oldest() {
    auto message = std::move(under_way_.front());
    under_way_.pop_front();
    wait_for(*message.work, poll_);
    int64_t offset = 0;
    for (const auto& tensor : message.tensors) {
      if (!sends()) {
        unpack(message.buffer, offset, tensor);
      }
      offset += padded_bytes(tensor);
    }
    if (!message.tensors.empty()) {
      free_.push_back(std::move(message.buffer));
    }
  }

  c10d::ProcessGroup& group_;
  const int64_t source_;
  const int64_t bucket_bytes_;
  const std::function<void()>& poll_;
  std::vector<at::Tensor> held_;
  int64_t held_bytes_ = 0;
  std::deque<Message> under_way_;
  std::vector<at::Tensor> free_;
};

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
  int64_t most = 0;
  for (const auto& tensor : tensors) {
    total_bytes += static_cast<int64_t>(tensor.nbytes());
    most += padded_bytes(tensor);
  }
  Transfer transfer(group, source, std::min(bucket_bytes, most), poll);
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) {
      transfer.add(tensor);
    }
  }
  transfer.finish();
  return total_bytes;
}

}  // namespace pipetransformer::autodp
