#include "autodp/control_plane.h"

#include <unistd.h>

#include <numeric>
#include <utility>

#include "autodp/store/patient_store.h"

namespace pipetransformer::autodp {

namespace {

constexpr std::chrono::milliseconds kStoreDeadline{2000};
constexpr std::chrono::milliseconds kRetireDeadline{1000};
// What taking an old generation's groups apart may delay the next one.
constexpr std::chrono::milliseconds kHandOverDeadline{20};

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

ControlPlane::Parts::Parts(
    c10::intrusive_ptr<c10d::Store> store,
    c10::intrusive_ptr<c10d::Store> watched_store,
    const WatcherOptions& options)
    : run(std::make_shared<RunState>(
          options.rank,
          all_ranks(options.world_size),
          options.survives)),
      client(std::make_shared<StoreClient>(
          std::move(store),
          run,
          options.store_rank)),
      watcher(std::move(watched_store), run, options),
      retire_thread(std::make_unique<TaskThread>("pt-retire")) {}

ControlPlane::ControlPlane(
    c10::intrusive_ptr<c10d::Store> store,
    c10::intrusive_ptr<c10d::Store> watched_store,
    const WatcherOptions& options,
    double group_timeout_s)
    : parts_(std::make_unique<Parts>(
          std::move(store),
          std::move(watched_store),
          options)),
      options_(options),
      group_timeout_s_(group_timeout_s),
      owner_pid_(::getpid()) {}

ControlPlane::~ControlPlane() {
  if (!owned_by_this_process()) {
    // A forked child: the threads stayed in the parent, a lock may be held for
    // ever, and the sockets are the parent's. Nothing is joined or freed.
    static_cast<void>(parts_.release());
    return;
  }
  close();
}

void ControlPlane::fail(Failure failure) {
  parts_->run->fail(std::move(failure));
}

c10::intrusive_ptr<c10d::Store> ControlPlane::group_store() const {
  return c10::make_intrusive<PatientStore>(
      parts_->client,
      parts_->run->generation()->latch,
      std::chrono::milliseconds(static_cast<int64_t>(group_timeout_s_ * 1000)));
}

std::unique_ptr<RendezvousBoard>
ControlPlane::begin_rendezvous(std::string standing) {
  return std::make_unique<RendezvousBoard>(
      parts_->client,
      parts_->run,
      options_.rank,
      options_.heartbeat_timeout_s,
      std::move(standing));
}

void ControlPlane::advance(const std::vector<int>& members) {
  auto next = std::make_unique<TaskThread>("pt-retire");
  parts_->run->advance(members);
  {
    const std::lock_guard lock(parts_->retire_mutex);
    parts_->retire_thread.swap(next);
  }
  next->stop(kHandOverDeadline);  // what is queued there is still done
}

void ControlPlane::retire(std::function<void()>&& task) {
  {
    const std::lock_guard lock(parts_->retire_mutex);
    if (parts_->retire_thread->post(std::move(task))) {
      return;
    }
  }
  // Still whole: see TaskThread::post.
  run_apart("pt-retire", std::move(task), kRetireDeadline);
}

bool ControlPlane::owned_by_this_process() const noexcept {
  return ::getpid() == owner_pid_;
}

void ControlPlane::stop_watching() noexcept {
  parts_->watcher.stop(kStoreDeadline);
  latch()->confirm_directly();
}

void ControlPlane::close() noexcept {
  if (!owned_by_this_process() || closed_.exchange(true)) {
    return;
  }
  stop_watching();
  parts_->client->stop(kStoreDeadline);
  const std::lock_guard lock(parts_->retire_mutex);
  parts_->retire_thread->stop(kRetireDeadline);
}

}  // namespace pipetransformer::autodp
