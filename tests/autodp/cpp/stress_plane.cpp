// Stress of the threads of a control plane, meant for the sanitizers: ranks are
// threads of this process, over stand-ins of torch's stores and backends.
//
//   stress_plane SEED ROUNDS
//
// Rounds of three kinds: worlds that lose ranks and go on, worlds that lose the
// store, and planes that are closed while others use them. What collectives and
// tasks hand over is plain memory, so a missing wait is a data race. Prints
// what failed and returns 1, or returns 0.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <utility>

#include "stress_rank.h"

namespace {

using namespace stress;

constexpr double kLossS = 2;  // until a store that stops is lost
constexpr double kNeverS = 60;

WatcherOptions options_of(int rank, bool survives, double timeout_s) {
  WatcherOptions options;
  options.rank = rank;
  options.world_size = kRanks;
  options.heartbeat_interval_s = 0.005;
  options.heartbeat_timeout_s = timeout_s;
  options.survives = survives;
  return options;
}

// Runs `live` on every rank of a new world, and `meanwhile` in this thread.
void in_world(
    const c10::intrusive_ptr<MemoryStore>& store,
    bool survives,
    double timeout_s,
    uint32_t seed,
    const std::function<void(Rank&, int rank)>& live,
    const std::function<void()>& meanwhile = [] {}) {
  std::vector<std::thread> threads;
  for (int number = 0; number < kRanks; ++number) {
    threads.emplace_back([&, number] {
      const auto options = options_of(number, survives, timeout_s);
      Rank rank(store, options, seed + 10 * static_cast<uint32_t>(number));
      live(rank, number);
    });
  }
  meanwhile();
  join_all(threads);
}

// Two generations end, each by a rank that is drawn; who is left changes plan.
void lose_ranks(uint32_t seed) {
  Random random(seed);
  const std::vector<std::pair<int, End>> ends{
      {draw(random, 0, 2), static_cast<End>(draw(random, 0, 3))},
      {draw(random, 0, 2), static_cast<End>(draw(random, 2, 3))}};
  const auto store = c10::make_intrusive<MemoryStore>();
  in_world(store, true, kNeverS, seed, [&](Rank& rank, int number) {
    for (const auto& [who, how] : ends) {
      // Where the one that is drawn has ended already, the lead does it.
      const auto& members = rank.plane().run().generation()->members;
      const bool there = std::count(members.begin(), members.end(), who) > 0;
      const bool mine = number == (there ? who : members.front());
      rank.train(mine ? std::optional(how) : std::nullopt);
      if (!rank.survive()) {
        return;
      }
    }
    rank.finish();
  });
}

// A stopped server answers again when the ranks have gone: to threads that were
// left behind.
void lose_store(uint32_t seed, MemoryStore::Server server) {
  Random random(seed);
  const bool outlives = draw(random, 0, 1) == 1;
  const bool stops = server == MemoryStore::Server::kStopped;
  const auto store = c10::make_intrusive<MemoryStore>();
  std::atomic<int> met{0};
  std::atomic<bool> turned{false};
  const auto live = [&](Rank& rank, int number) {
    try {
      rank.meet_peers();
    } catch (const PeerFailureError&) {  // starved for seconds
    }
    ++met;
    if (!stops || number > 0) {
      rank.lose_store(outlives);
      return;
    }
    while (!turned) {
      std::this_thread::sleep_for(kSlice);
    }
    rank.fail_without_store();
  };
  in_world(store, true, kLossS, seed, live, [&] {
    while (met < kRanks) {
      std::this_thread::sleep_for(kSlice);
    }
    store->turn(server);
    turned = true;
  });
  store->turn(MemoryStore::Server::kServes);
  std::this_thread::sleep_for(10 * kSlice);
}

// One thread closes the plane, or it is told to terminate, while others use it.
void close_in_use(uint32_t seed) {
  const auto store = c10::make_intrusive<MemoryStore>();
  in_world(store, false, kNeverS, seed, [&](Rank& rank, int number) {
    Random random(seed + static_cast<uint32_t>(number));
    std::thread closer([&] {
      nap(random, 30000);
      if (number == 0) {
        rank.terminate();
      }
      rank.plane().close();
    });
    try {
      while (true) {
        rank.plane().store().wait_any({{"never"}}, kSlice);
      }
    } catch (const PeerFailureError&) {
    } catch (const c10::Error&) {
    }
    closer.join();
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: stress_plane SEED ROUNDS\n");
    return 2;
  }
  const auto seed = static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10));
  const int rounds = std::atoi(argv[2]);
  // Waits for deadlines most of the time: alongside the others.
  std::vector<std::thread> lost;
  for (const auto server :
       {MemoryStore::Server::kDead, MemoryStore::Server::kStopped}) {
    lost.emplace_back([=] { lose_store(seed, server); });
  }
  for (int round = 0; round < rounds; ++round) {
    const auto drawn = seed + 1000 * static_cast<uint32_t>(round + 1);
    lose_ranks(drawn);
    close_in_use(drawn);
  }
  join_all(lost);
  check(num_recoveries > 0 && num_collectives > 0, "ranks went on");
  std::printf(
      "%d rounds, %d recoveries, %d collectives, %d failures\n",
      rounds,
      num_recoveries.load(),
      num_collectives.load(),
      num_failures.load());
  return num_failures == 0 ? 0 : 1;
}
