#include "autodp/message_plane.h"

#include <unistd.h>

#include <utility>

namespace pipetransformer::autodp {

namespace {

constexpr std::chrono::milliseconds kStoreDeadline{2000};
constexpr std::chrono::milliseconds kRetireDeadline{1000};

}  // namespace

MessagePlane::Parts::Parts(
    const c10::intrusive_ptr<c10d::Store>& store,
    const WatcherOptions& options)
    : latch(std::make_shared<FailureLatch>()),
      client(store, latch, options.store_rank),
      watcher(store, latch, options),
      retire_thread("pt-retire") {}

MessagePlane::MessagePlane(
    const c10::intrusive_ptr<c10d::Store>& store,
    const WatcherOptions& options)
    : parts_(std::make_unique<Parts>(store, options)), owner_pid_(::getpid()) {}

MessagePlane::~MessagePlane() {
  if (!owned_by_this_process()) {
    // A forked child: the threads stayed in the parent, a lock may be held for
    // ever, and the sockets are the parent's. Nothing is joined or freed.
    static_cast<void>(parts_.release());
    return;
  }
  close();
}

void MessagePlane::fail(Failure failure) {
  parts_->latch->fail(std::move(failure));
}

void MessagePlane::retire(std::function<void()>&& task) {
  if (!parts_->retire_thread.post(std::move(task))) {
    TaskThread late("pt-retire");
    late.post(std::move(task));  // still whole: see TaskThread::post
    late.stop(kRetireDeadline);
  }
}

bool MessagePlane::owned_by_this_process() const noexcept {
  return ::getpid() == owner_pid_;
}

void MessagePlane::stop_watching() noexcept {
  parts_->watcher.stop(kStoreDeadline);
  parts_->latch->confirm_directly();
}

void MessagePlane::close() noexcept {
  if (!owned_by_this_process() || closed_.exchange(true)) {
    return;
  }
  stop_watching();
  parts_->client.stop(kStoreDeadline);
  parts_->retire_thread.stop(kRetireDeadline);
}

}  // namespace pipetransformer::autodp
