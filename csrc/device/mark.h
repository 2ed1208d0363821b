// Points in the work of streams: what another stream can wait for.
//
// Thread safety: a Mark is immutable and may be used by several threads; a pool
// locks itself. Ownership: a Mark shares its event and gives it back to its
// pool when the last copy goes; the pool lives as long as its marks.
// Works through c10's virtual guards: no CUDA header, any accelerator.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace pipetransformer::device {

// False for CPU and meta, whose work is done when the call returns.
bool has_streams(c10::Device device) noexcept;

// The calling thread's current stream of a device that has streams.
c10::Stream current_stream(c10::Device device);

// "All that had been queued on stream() when the mark was made." An empty mark
// is a point in the past.
class Mark {
 public:
  Mark() = default;

  bool empty() const noexcept {
    return point_ == nullptr;
  }
  // Of a mark that is not empty.
  c10::Stream stream() const noexcept;
  // What is queued on `stream` from now on runs after the marked point. Costs
  // nothing for an empty mark and on the marked stream itself. Does not block.
  void hold_back(c10::Stream stream) const;
  // The host waits for the marked point.
  void wait() const;

 private:
  friend class MarkPool;
  struct Point;
  explicit Mark(std::shared_ptr<const Point> point) noexcept;

  std::shared_ptr<const Point> point_;
};

// Events for marks, used again and again: making one costs more than recording.
class MarkPool : public std::enable_shared_from_this<MarkPool> {
 public:
  Mark record(c10::Stream stream);

 private:
  friend class Mark;
  c10::Event take(c10::Device device);
  void give_back(c10::Event event) noexcept;

  std::mutex mutex_;
  std::unordered_map<c10::Device, std::vector<c10::Event>> free_;
};

}  // namespace pipetransformer::device
