#include "simulator/task_graph.h"

#include <stdexcept>

namespace pipetransformer::simulator {

namespace {

constexpr int64_t kEndlessNs = int64_t{1} << 60;

[[noreturn]] void refuse(
    const std::string& what,
    const std::string& expected,
    const std::string& got) {
  throw std::invalid_argument(what + ": expected " + expected + ", got " + got);
}

void check_values(const TaskGraph& graph) {
  int64_t left_ns = kEndlessNs;
  for (const Task& task : graph.tasks()) {
    if (task.duration_ns < 0) {
      refuse(
          "simulator, " + to_string(task),
          "a duration of at least 0 ns",
          std::to_string(task.duration_ns));
    }
    if (task.duration_ns > left_ns) {
      refuse(
          "simulator, " + to_string(task),
          "tasks of at most 2^60 ns together",
          "more");
    }
    left_ns -= task.duration_ns;
    if (task.resource < 0 ||
        static_cast<std::size_t>(task.resource) >= graph.num_resources()) {
      refuse(
          "simulator, " + to_string(task),
          "a resource below " + std::to_string(graph.num_resources()),
          std::to_string(task.resource));
    }
  }
  const auto count = static_cast<int32_t>(graph.tasks().size());
  for (const auto& [earlier, task] : graph.waits()) {
    if (earlier < 0 || earlier >= count || task < 0 || task >= count) {
      refuse(
          "simulator, waits",
          "tasks below " + std::to_string(count),
          std::to_string(earlier) + " before " + std::to_string(task));
    }
  }
}

// Takes tasks away that wait for none of those left; what cannot be taken is
// on a circle or behind one. Walking to an open predecessor until one repeats
// finds a task of the circle itself.
void check_acyclic(const TaskGraph& graph) {
  const Followers followers(graph);
  std::vector<int32_t> open = followers.num_waits();
  std::vector<int32_t> ready;
  const auto count = static_cast<int32_t>(graph.tasks().size());
  for (int32_t i = 0; i < count; ++i) {
    if (open[static_cast<std::size_t>(i)] == 0) {
      ready.push_back(i);
    }
  }
  for (std::size_t next = 0; next < ready.size(); ++next) {
    for (const int32_t* at = followers.begin(ready[next]);
         at != followers.end(ready[next]);
         ++at) {
      if (--open[static_cast<std::size_t>(*at)] == 0) {
        ready.push_back(*at);
      }
    }
  }
  if (ready.size() == graph.tasks().size()) {
    return;
  }
  std::vector<int32_t> before(graph.tasks().size(), -1);
  int32_t at = -1;
  for (const auto& [earlier, task] : graph.waits()) {
    if (open[static_cast<std::size_t>(earlier)] > 0 &&
        open[static_cast<std::size_t>(task)] > 0) {
      before[static_cast<std::size_t>(task)] = earlier;
      at = task;
    }
  }
  std::vector<bool> seen(graph.tasks().size(), false);
  while (!seen[static_cast<std::size_t>(at)]) {
    seen[static_cast<std::size_t>(at)] = true;
    at = before[static_cast<std::size_t>(at)];
  }
  refuse(
      "simulator",
      "tasks that do not wait for each other in a circle",
      to_string(graph.tasks()[static_cast<std::size_t>(at)]) +
          ", which waits for itself");
}

}  // namespace

std::string to_string(const Task& task) {
  std::string text(1, static_cast<char>(task.kind));
  if (task.direction != Direction::kNone) {
    text += static_cast<char>(task.direction);
  }
  if (task.microbatch >= 0) {
    text += std::to_string(task.microbatch);
  }
  return text + " on stage " + std::to_string(task.stage) + " of replica " +
         std::to_string(task.replica);
}

bool is_pipeline(TaskKind kind) {
  return kind == TaskKind::kForward || kind == TaskKind::kRecompute ||
         kind == TaskKind::kBackward || kind == TaskKind::kInputGrad ||
         kind == TaskKind::kWeightGrad;
}

int32_t TaskGraph::add_resource(ResourceKind kind) {
  resources_.push_back(kind);
  return static_cast<int32_t>(resources_.size()) - 1;
}

int32_t TaskGraph::add(const Task& task) {
  tasks_.push_back(task);
  return static_cast<int32_t>(tasks_.size()) - 1;
}

void TaskGraph::wait(int32_t task, int32_t earlier) {
  waits_.emplace_back(earlier, task);
}

ResourceKind TaskGraph::resource(int32_t index) const {
  return resources_.at(static_cast<std::size_t>(index));
}

void TaskGraph::check() const {
  check_values(*this);
  check_acyclic(*this);
}

Followers::Followers(const TaskGraph& graph)
    : offsets_(graph.tasks().size() + 1, 0),
      tasks_(graph.waits().size()),
      num_waits_(graph.tasks().size(), 0) {
  for (const auto& [earlier, task] : graph.waits()) {
    ++offsets_[static_cast<std::size_t>(earlier) + 1];
    ++num_waits_[static_cast<std::size_t>(task)];
  }
  for (std::size_t i = 1; i < offsets_.size(); ++i) {
    offsets_[i] += offsets_[i - 1];
  }
  std::vector<std::size_t> next(offsets_.begin(), offsets_.end() - 1);
  for (const auto& [earlier, task] : graph.waits()) {
    tasks_[next[static_cast<std::size_t>(earlier)]++] = task;
  }
}

}  // namespace pipetransformer::simulator
