// Memory as O_DIRECT asks for it, kept for the next taker: pages that were
// touched once cost nothing again. Thread-safe. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace pipetransformer::autocache {

class AlignedBuffers : public std::enable_shared_from_this<AlignedBuffers> {
 public:
  // Keeps at most that many bytes that nobody has taken.
  explicit AlignedBuffers(uint64_t kept_bytes) noexcept
      : kept_bytes_(kept_bytes) {}
  ~AlignedBuffers();
  AlignedBuffers(const AlignedBuffers&) = delete;
  AlignedBuffers& operator=(const AlignedBuffers&) = delete;

  // `bytes` > 0, which come back when the last owner lets go of them; null: the
  // memory cannot be had. The object is held by a shared pointer.
  std::shared_ptr<std::byte> take(uint64_t bytes) noexcept;

 private:
  void give_back(std::byte* data, uint64_t bytes) noexcept;

  const uint64_t kept_bytes_;
  std::mutex mutex_;
  uint64_t idle_bytes_ = 0;
  std::multimap<uint64_t, std::byte*> idle_;  // by size
};

}  // namespace pipetransformer::autocache
