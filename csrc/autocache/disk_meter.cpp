#include "autocache/disk_meter.h"

namespace pipetransformer::autocache {

void DiskMeter::begin() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (under_way_++ == 0) {
    since_ = Clock::now();
  }
}

void DiskMeter::end(uint64_t bytes) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--under_way_ == 0) {
    total_.busy += Clock::now() - since_;
  }
  total_.bytes += bytes;
}

DiskMeter::Total DiskMeter::total() const noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  Total total = total_;
  if (under_way_ > 0) {
    total.busy += Clock::now() - since_;
  }
  return total;
}

}  // namespace pipetransformer::autocache
