#include "simulator/replay.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <stdexcept>
#include <tuple>

namespace pipetransformer::simulator {

namespace {

template <typename T>
using MinQueue = std::priority_queue<T, std::vector<T>, std::greater<>>;

constexpr int32_t kNoTask = -1;

struct ResourceState {
  MinQueue<std::pair<int64_t, int32_t>> ready;  // (since when, task)
  bool busy = false;
};

// Note [One instant at a time]
// All that ends at an instant is taken in before a resource chooses what to do
// next, tasks without duration included. Only then are resources that stand
// still given a grain of fill work: a grain never starts in the place of a task
// that is ready at the same instant.
class Replayer {
 public:
  Replayer(const TaskGraph& graph, const FillWork& fill)
      : graph_(graph),
        fill_(fill),
        followers_(graph),
        open_(followers_.num_waits()),
        resources_(graph.num_resources()) {
    result_.spans.resize(graph.tasks().size());
    result_.fill_left_ns = fill.total_ns;
  }

  Replay run() {
    for (std::size_t i = 0; i < open_.size(); ++i) {
      if (open_[i] == 0) {
        arrive(static_cast<int32_t>(i), 0);
      }
    }
    start_ready(0);
    start_fill(0);
    std::size_t left = graph_.tasks().size();
    while (left > 0) {
      const int64_t now = ends_.top().time_ns;
      while (!ends_.empty() && ends_.top().time_ns == now) {
        while (!ends_.empty() && ends_.top().time_ns == now) {
          const End end = ends_.top();
          ends_.pop();
          left -= finish(end, now);
        }
        start_ready(now);
      }
      if (left > 0) {
        start_fill(now);
      }
    }
    return std::move(result_);
  }

 private:
  struct End {
    int64_t time_ns = 0;
    int32_t task = kNoTask;  // kNoTask: a grain
    int32_t resource = 0;

    bool operator>(const End& other) const {
      return std::tie(time_ns, task, resource) >
             std::tie(other.time_ns, other.task, other.resource);
    }
  };

  ResourceState& state(int32_t resource) {
    return resources_[static_cast<std::size_t>(resource)];
  }

  void arrive(int32_t task, int64_t now) {
    const int32_t resource =
        graph_.tasks()[static_cast<std::size_t>(task)].resource;
    state(resource).ready.emplace(now, task);
    touched_.push_back(resource);
  }

  // Number of tasks that ended: 0 for a grain.
  std::size_t finish(const End& end, int64_t now) {
    state(end.resource).busy = false;
    touched_.push_back(end.resource);
    if (end.task == kNoTask) {
      return 0;
    }
    for (const int32_t* at = followers_.begin(end.task);
         at != followers_.end(end.task);
         ++at) {
      if (--open_[static_cast<std::size_t>(*at)] == 0) {
        arrive(*at, now);
      }
    }
    return 1;
  }

  void start_ready(int64_t now) {
    for (const int32_t index : touched_) {
      ResourceState& resource = state(index);
      if (resource.busy || resource.ready.empty()) {
        continue;
      }
      const int32_t task = resource.ready.top().second;
      resource.ready.pop();
      resource.busy = true;
      const int64_t end =
          now + graph_.tasks()[static_cast<std::size_t>(task)].duration_ns;
      result_.spans[static_cast<std::size_t>(task)] = {task, now, end};
      ends_.push({end, task, index});
    }
    touched_.clear();
  }

  void start_fill(int64_t now) {
    for (const int32_t index : fill_.resources) {
      if (result_.fill_left_ns == 0) {
        return;
      }
      if (!state(index).busy) {
        const int64_t grain = std::min(fill_.grain_ns, result_.fill_left_ns);
        state(index).busy = true;
        result_.fill_left_ns -= grain;
        result_.fills.push_back({index, now, now + grain});
        ends_.push({now + grain, kNoTask, index});
      }
    }
  }

  const TaskGraph& graph_;
  const FillWork& fill_;
  const Followers followers_;
  std::vector<int32_t> open_;
  std::vector<ResourceState> resources_;
  std::vector<int32_t> touched_;  // resources that may start something
  MinQueue<End> ends_;
  Replay result_;
};

void check_fill(const TaskGraph& graph, const FillWork& fill) {
  if (fill.total_ns < 0 || fill.total_ns > int64_t{1} << 60 ||
      fill.grain_ns < 1) {
    throw std::invalid_argument(
        "simulator, fill work: expected 0 to 2^60 ns in grains of at least 1 "
        "ns, got " +
        std::to_string(fill.total_ns) + " ns in grains of " +
        std::to_string(fill.grain_ns) + " ns");
  }
  for (const int32_t resource : fill.resources) {
    if (resource < 0 ||
        static_cast<std::size_t>(resource) >= graph.num_resources()) {
      throw std::invalid_argument(
          "simulator, fill work: expected resources below " +
          std::to_string(graph.num_resources()) + ", got " +
          std::to_string(resource));
    }
  }
}

}  // namespace

Replay replay(const TaskGraph& graph, const FillWork& fill) {
  graph.check();
  check_fill(graph, fill);
  return Replayer(graph, fill).run();
}

}  // namespace pipetransformer::simulator
