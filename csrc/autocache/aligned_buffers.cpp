#include "autocache/aligned_buffers.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace pipetransformer::autocache {

namespace {

constexpr uint64_t kPageAlignment = 4096;

}  // namespace

AlignedBuffers::~AlignedBuffers() {
  for (const auto& [bytes, data] : idle_) {
    std::free(data);
  }
}

std::shared_ptr<std::byte> AlignedBuffers::take(uint64_t bytes) noexcept {
  uint64_t size =
      (bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
  std::byte* data = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto fitting = idle_.lower_bound(size);
    if (fitting != idle_.end() && fitting->first / 2 <= size) {
      size = fitting->first;
      data = fitting->second;
      idle_bytes_ -= size;
      idle_.erase(fitting);
    }
  }
  if (data == nullptr) {
    data = static_cast<std::byte*>(std::aligned_alloc(kPageAlignment, size));
  }
  if (data == nullptr) {
    return nullptr;
  }
  try {
    return std::shared_ptr<std::byte>(
        data, [owner = shared_from_this(), size](std::byte* taken) {
          owner->give_back(taken, size);
        });
  } catch (const std::bad_alloc&) {
    return nullptr;  // the deleter has run
  }
}

void AlignedBuffers::give_back(std::byte* data, uint64_t bytes) noexcept {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_bytes_ + bytes <= kept_bytes_) {
      idle_.emplace(bytes, data);
      idle_bytes_ += bytes;
      return;
    }
  } catch (const std::bad_alloc&) {
    // Without memory for the note, the buffer itself is of more use.
  }
  std::free(data);
}

}  // namespace pipetransformer::autocache
