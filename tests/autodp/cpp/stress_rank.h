// A rank of the stress test: a plane, and the threads that use it as the engine
// does.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "autodp/control_plane.h"
#include "autodp/groups/active_group.h"
#include "autodp/store/store_board.h"
#include "memory_store.h"
#include "slow_backend.h"

namespace stress {

using namespace pipetransformer::autodp;
using standin::MemoryStore;
using standin::SlowBackend;
using std::chrono::milliseconds;

inline constexpr int kRanks = 3;
inline constexpr milliseconds kSlice{20};
inline std::atomic<int> num_failures{0};
inline std::atomic<int> num_recoveries{0};
inline std::atomic<int> num_collectives{0};

inline void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    ++num_failures;
  }
}

using Random = std::mt19937;

inline int draw(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

inline void nap(Random& random, int longest_us) {
  std::this_thread::sleep_for(
      std::chrono::microseconds(draw(random, 0, longest_us)));
}

inline void join_all(std::vector<std::thread>& threads) {
  for (auto& thread : threads) {
    thread.join();
  }
  threads.clear();
}

// How a rank ends its generation.
enum class End { kOwnError, kSigterm, kDeadline, kPeerGone };

// A rank's plane, the pipe its signals come through, and the threads of the
// user: one looks at the plane, one writes keys, the caller's trains.
class Rank {
 public:
  Rank(
      const c10::intrusive_ptr<MemoryStore>& store,
      const WatcherOptions& options,
      uint32_t seed)
      : rank_(options.rank),
        random_(seed),
        plane_(std::make_shared<ControlPlane>(
            store->clone(),
            store->clone(),
            options,
            options.heartbeat_timeout_s)) {
    check(::pipe2(signals_, O_NONBLOCK) == 0, "a pipe");
    check(::pipe2(forward_, O_NONBLOCK) == 0, "a pipe to forward to");
    plane_->watcher().watch_signals(
        signals_[0], forward_[1], {{SIGTERM, "SIGTERM"}});
    users_.emplace_back([this, seed] { look(Random(seed + 1)); });
    users_.emplace_back([this, seed] { write(Random(seed + 2)); });
  }

  ~Rank() {
    running_ = false;
    join_all(users_);
    plane_->watcher().unwatch_signals();
    plane_->close();
    plane_.reset();
    for (const int fd : {signals_[0], signals_[1], forward_[0], forward_[1]}) {
      ::close(fd);
    }
  }

  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Collectives and keys until the generation ends, which `end` may bring
  // about.
  void train(const std::optional<End>& end) {
    const auto latch = plane_->latch();
    const auto inner = c10::make_intrusive<SlowBackend>(rank_, kRanks);
    const auto on_device =
        c10::make_intrusive<SlowBackend>(rank_, kRanks, /*queues=*/true);
    auto group = make_group(inner, on_device);
    std::thread backward([&] { reduce(*group->process_group(), latch); });
    auto step = [&] {
      meet_peers();
      if (end.has_value()) {
        this->end(*end, inner.get(), on_device.get());
      }
      while (true) {
        plane_->store().wait_any({{"never"}}, kSlice);
      }
    };
    try {
      step();
    } catch (const PeerFailureError&) {
    }
    check(latch->failed() || lost_store(), "an error means a failure");
    // Retired while the other thread may still start collectives.
    group->retire();
    backward.join();
  }

  // The rendezvous; returns whether this rank goes on.
  bool survive() {
    if (plane_->run().ended().has_value()) {
      return false;
    }
    try {
      auto roll = plane_->begin_rendezvous("standing");
      while (!roll->step()) {
        nap(random_, 2000);
      }
      if (roll->fenced()) {
        return false;
      }
      std::vector<int> members;
      for (const auto& [member, standing] : roll->standings()) {
        check(standing == "standing", "a survivor's standing");
        members.push_back(member);
      }
      plane_->advance(members);
    } catch (const PeerFailureError&) {
      return false;
    }
    ++num_recoveries;
    return true;
  }

  // A change of plan by the members that are left, then the end of the run.
  void finish() {
    const auto generation = plane_->run().generation();
    change_plan(*generation);
    plane_->run().set_epoch(0);
    ActiveGroup alone(plane_, plane_->group_store(), c10::DeviceType::CPU);
    std::vector<at::Tensor> tensors(1);
    alone.process_group()->getDefaultBackend()->allreduce(tensors, {})->wait();
    std::vector<std::string> ended;
    for (const int member : generation->members) {
      ended.push_back(generation->key("finish/" + std::to_string(member)));
    }
    plane_->store().set(
        generation->key("finish/" + std::to_string(rank_)), "1");
    while (plane_->store().wait_any({ended}, kSlice) < 0) {
    }
    plane_->stop_watching();
  }

  // The peers' addresses, as a backend that connects asks for them.
  void meet_peers() {
    const auto store = plane_->group_store();
    const auto generation = plane_->run().generation();
    for (int i = 0; i < 5; ++i) {
      const auto name = generation->key("g/" + std::to_string(i) + "/");
      store->set(name + std::to_string(rank_), std::string("address"));
      for (const int member : generation->members) {
        store->get(name + std::to_string(member));
      }
    }
  }

  // With a stopped server: an operation of the rendezvous is left behind.
  void fail_without_store() {
    end(End::kDeadline, nullptr, nullptr);
    check(!survive() && lost_store(), "no rendezvous without the store");
  }

  // Trains on without the store for a while if `outlives`; else must fail.
  void lose_store(bool outlives) {
    plane_->run().outlive_store(outlives);
    train(std::nullopt);
    if (outlives && !plane_->latch()->failed()) {
      const auto group =
          make_group(c10::make_intrusive<SlowBackend>(rank_, kRanks));
      check(lost_store(), "the loss is noted");
      std::vector<at::Tensor> tensors(1);
      group->process_group()
          ->getDefaultBackend()
          ->allreduce(tensors, {})
          ->wait();
      check(tensors[0].item() == 1, "a collective goes on without the store");
      plane_->run().outlive_store(false);
    }
    check(plane_->latch()->failed(), "who does not outlive the store fails");
  }

  ControlPlane& plane() {
    return *plane_;
  }
  void terminate() {
    const char byte = SIGTERM;
    check(::write(signals_[1], &byte, 1) == 1, "a signal");
  }

 private:
  bool lost_store() const {
    return plane_->run().store_loss().has_value();
  }

  std::unique_ptr<ActiveGroup> make_group(
      const c10::intrusive_ptr<SlowBackend>& inner,
      const c10::intrusive_ptr<SlowBackend>& on_device = {}) {
    return std::make_unique<ActiveGroup>(
        plane_,
        plane_->group_store(),
        inner,
        on_device,
        c10::DeviceType::CUDA,
        milliseconds(1000));
  }

  void change_plan(const Generation& generation) {
    TransitionOptions options;
    options.rank = rank_;
    options.world_size = kRanks;
    options.writer = rank_ == generation.members.front();
    options.participants = generation.members;
    options.run = "run";
    Transition change(options);
    StoreBoard board(plane_->store(), generation.key(""));
    const auto drive_on = [&] {
      while (!drive(change, board, kSlice)) {
      }
    };
    if (options.writer) {
      change.announce("plan");
    } else {
      change.receive();
    }
    drive_on();
    change.meet();
    drive_on();
    change.acknowledge({});
    drive_on();
    change.decide();
    drive_on();
    check(
        change.verdict().has_value() &&
            change.verdict()->outcome == Outcome::kCommit,
        "the members commit");
  }

  void end(End kind, SlowBackend* inner, SlowBackend* on_device) {
    nap(random_, 20000);
    // A kernel that spins: only a failure that somebody else finds ends it.
    if (on_device != nullptr && kind != End::kPeerGone) {
      on_device->turn(SlowBackend::Peers::kStuck);
    }
    switch (kind) {
      case End::kOwnError:
        plane_->fail({rank_, "user code", -1, -1, "KeyError"});
        return;
      case End::kSigterm:
        terminate();
        return;
      case End::kDeadline:
        plane_->fail({-1, "test", -1, 1, "a deadline passed"});
        return;
      case End::kPeerGone:
        inner->turn(SlowBackend::Peers::kGone);
        return;
    }
  }

  // What autograd's thread does.
  void reduce(
      c10d::ProcessGroup& group,
      const std::shared_ptr<FailureLatch>& latch) {
    auto& backend = *group.getDefaultBackend();
    auto& on_device = *group.getBackend(c10::DeviceType::CUDA);
    try {
      while (!latch->failed()) {
        std::vector<at::Tensor> tensors(2);
        const auto queued = on_device.allreduce(tensors, {});
        while (!wait_done(*queued, kSlice)) {
        }
        queued->wait();
        const auto work = backend.allreduce(tensors, {});
        auto seen = std::make_shared<int64_t>(0);
        work->getFuture()->addCallback(
            [seen](c10::ivalue::Future&) { ++*seen; });
        const auto barrier = backend.barrier({});
        work->wait();
        check(tensors[1].item() == 1, "a collective's result");
        barrier->wait();
        ++num_collectives;
      }
    } catch (const PeerFailureError&) {
    } catch (const c10::Error&) {  // retired
    }
  }

  void look(Random random) {
    uint64_t subscription = 0;
    while (running_) {
      const auto latch = plane_->latch();
      latch->unsubscribe(subscription);
      subscription = latch->subscribe([](const Failure& failure) {
        check(!failure.phase.empty(), "a failure has a phase");
      });
      const bool failed = latch->failed();
      check(!failed || latch->failure().has_value(), "a failure stays");
      plane_->run().ended();
      plane_->store().num_operations();
      nap(random, 3000);
    }
  }

  void write(Random random) {
    const auto key = "side/" + std::to_string(rank_);
    while (running_) {
      try {
        plane_->store().set(key, "value");
        plane_->store().compare_set(key, "value", "other");
        plane_->store().remove_later({key});
        plane_->retire(
            [cargo = std::make_shared<std::string>(key)] { *cargo += "!"; });
      } catch (const PeerFailureError&) {
      } catch (const c10::Error&) {  // closed
      }
      nap(random, 3000);
    }
  }

  const int rank_;
  Random random_;
  std::shared_ptr<ControlPlane> plane_;
  int signals_[2] = {-1, -1};
  int forward_[2] = {-1, -1};
  std::atomic<bool> running_{true};
  std::vector<std::thread> users_;
};

}  // namespace stress
