#include "device/mark.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace pipetransformer::device {

bool has_streams(c10::Device device) noexcept {
  return !device.is_cpu() && !device.is_meta();
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Events are recorded, and waited for, while their stream's device is the
// current one. CUDA's guard would go there and back: back to device 0 on a
// thread that has never chosen one, where it would make a context.
struct Mark::Point {
  Point(
      std::shared_ptr<MarkPool> owner,
      c10::Event recorded,
      c10::Stream of_stream)
      : pool(std::move(owner)), event(std::move(recorded)), stream(of_stream) {}
  ~Point() {
    pool->give_back(std::move(event));
  }
  Point(const Point&) = delete;
  Point& operator=(const Point&) = delete;

  std::shared_ptr<MarkPool> pool;
  c10::Event event;
  c10::Stream stream;
};

Mark::Mark(std::shared_ptr<const Point> point) noexcept
    : point_(std::move(point)) {}

c10::Stream Mark::stream() const noexcept {
  return point_->stream;
}

void Mark::hold_back(c10::Stream stream) const {
  if (point_ != nullptr && point_->stream != stream) {
    const c10::DeviceGuard on_its_device(stream.device());
    point_->event.block(stream);
  }
}

void Mark::wait() const {
  if (point_ != nullptr) {
    const c10::DeviceGuard on_its_device(point_->stream.device());
    point_->event.synchronize();
  }
}

Mark MarkPool::record(c10::Stream stream) {
  c10::Event event = take(stream.device());
  const c10::DeviceGuard on_its_device(stream.device());
  event.record(stream);
  return Mark(std::make_shared<const Mark::Point>(
      shared_from_this(), std::move(event), stream));
}

// An event is recorded again only when its mark is gone, so when nobody can
// start to wait for the old point; waits that are queued keep their point.
c10::Event MarkPool::take(c10::Device device) {
  const std::lock_guard lock(mutex_);
  auto& events = free_[device];
  if (events.empty()) {
    return c10::Event(device.type());
  }
  c10::Event event = std::move(events.back());
  events.pop_back();
  return event;
}

void MarkPool::give_back(c10::Event event) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    free_[event.device()].push_back(std::move(event));
  } catch (const std::bad_alloc&) {
    // The event is destroyed instead.
  }
}

}  // namespace pipetransformer::device
