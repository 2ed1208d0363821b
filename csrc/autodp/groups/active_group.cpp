#include "autodp/groups/active_group.h"

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>

namespace pipetransformer::autodp {

namespace {

// The store answers in less, or is lost.
constexpr double kAccountS = 0.25;

}  // namespace

ActiveGroup::ActiveGroup(
    std::shared_ptr<ControlPlane> plane,
    const c10::intrusive_ptr<c10d::Store>& store,
    c10::intrusive_ptr<c10d::Backend> inner,
    c10::intrusive_ptr<c10d::Backend> on_device,
    c10::DeviceType device_type,
    std::chrono::milliseconds timeout)
    : plane_(std::move(plane)),
      latch_(plane_->latch()),
      guarded_(c10::make_intrusive<GuardedBackend>(
          std::move(inner),
          latch_,
          timeout)) {
  if (on_device) {
    on_device_ = c10::make_intrusive<GuardedBackend>(
        std::move(on_device), latch_, timeout, WorkEnds::kOnDevice);
  }
  make_process_group(store, guarded_, on_device_, device_type);
}

ActiveGroup::ActiveGroup(
    std::shared_ptr<ControlPlane> plane,
    const c10::intrusive_ptr<c10d::Store>& store,
    c10::DeviceType device_type)
    : plane_(std::move(plane)), latch_(plane_->latch()) {
  make_process_group(
      store, c10::make_intrusive<SingleBackend>(latch_), {}, device_type);
}

ActiveGroup::~ActiveGroup() {
  retire();
}

void ActiveGroup::make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const c10::intrusive_ptr<c10d::Backend>& on_device,
    c10::DeviceType device_type) {
  using Type = c10d::ProcessGroup::BackendType;
  constexpr auto kType = Type::CUSTOM;
  process_group_ = c10::make_intrusive<c10d::ProcessGroup>(
      store, backend->getRank(), backend->getSize());
  process_group_->setBackend(c10::DeviceType::CPU, kType, backend);
  if (on_device) {
    // A group has one backend of a type.
    process_group_->setBackend(device_type, Type::NCCL, on_device);
  } else if (device_type != c10::DeviceType::CPU) {
    process_group_->setBackend(device_type, kType, backend);
  }
  process_group_->setDefaultBackend(kType);
}

void ActiveGroup::check_ended() {
  if (on_device_) {
    on_device_->check_ended();
  } else {
    latch_->check();
  }
}

void ActiveGroup::retire() noexcept {
  if (!guarded_ || retired_.exchange(true)) {
    return;
  }
  if (!plane_->owned_by_this_process()) {
    // A forked child: the backend's threads and sockets are its parent's.
    static_cast<void>(guarded_.release());
    static_cast<void>(on_device_.release());
    static_cast<void>(process_group_.release());
    return;
  }
  // Dropping the last reference joins the backend's threads, which may wait for
  // a stuck collective until its timeout. It also closes the connections: see
  // Note [Accounts come first] in watcher.cpp.
  auto task = [on_host = guarded_->take_apart(),
               on_device = on_device_ ? on_device_->take_apart()
                                      : std::function<void()>(),
               latch = latch_] {
    latch->wait_told(kAccountS);
    if (on_device) {
      on_device();
    }
    on_host();
  };
  if (plane_->latch() == latch_) {
    plane_->retire(std::move(task));
    return;
  }
  // Without a deadline: it goes on by itself.
  run_apart("pt-retire", std::move(task), std::chrono::milliseconds(0));
}

bool wait_done(c10d::Work& work, std::chrono::milliseconds slice) {
  const auto end = std::chrono::steady_clock::now() + slice;
  auto pause = std::chrono::microseconds(20);
  while (!work.isCompleted()) {
    if (std::chrono::steady_clock::now() >= end) {
      return false;
    }
    std::this_thread::sleep_for(pause);
    // Grows slowly, so that little is slept away behind the end of a short
    // wait.
    pause = std::min(pause * 5 / 4, std::chrono::microseconds(1000));
  }
  return true;
}

}  // namespace pipetransformer::autodp
