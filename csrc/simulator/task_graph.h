// Work as a graph: tasks with a duration on resources, and who waits for whom.
// Built by tasks_of_step (step_tasks.h), timed by replay (replay.h).
//
// Plain values, int64 nanoseconds; not thread-safe while it is built.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pipetransformer::simulator {

enum class TaskKind : char {
  kForward = 'F',
  kRecompute = 'R',
  kBackward = 'B',
  kInputGrad = 'I',
  kWeightGrad = 'W',
  kPrefix = 'P',     // forward of the frozen layers
  kCopy = 'C',       // between two devices
  kAllReduce = 'A',  // of a stage's gradients, all replicas
  kCacheRead = 'H',
  kOptimizer = 'O',
};

enum class Direction : char { kNone = ' ', kForward = '>', kBackward = '<' };

// What runs one task at a time. Tasks are served in the order in which they
// become ready, ties by their number in the graph.
enum class ResourceKind : char {
  kCompute,     // of a device
  kCopyEngine,  // into a device, one for each direction
  kDeviceLink,  // of a device, to those of other replicas in its node
  kNetwork,     // the network card that the stages of a replica share
  kCache,       // host memory or disk
};

struct Task {
  TaskKind kind = TaskKind::kForward;
  int32_t replica = 0;
  int32_t stage = 0;        // of a copy: where it arrives
  int32_t microbatch = -1;  // -1: belongs to the whole step
  Direction direction = Direction::kNone;
  int32_t resource = 0;
  int64_t duration_ns = 0;
};

// Such as "F3 on stage 1 of replica 0".
std::string to_string(const Task& task);

// Whether it is one of the pipeline's own operations: F, R, B, I or W.
bool is_pipeline(TaskKind kind);

class TaskGraph {
 public:
  int32_t add_resource(ResourceKind kind);
  int32_t add(const Task& task);
  // `task` starts only when `earlier` has ended.
  void wait(int32_t task, int32_t earlier);

  const std::vector<Task>& tasks() const {
    return tasks_;
  }
  // Pairs (earlier, task).
  const std::vector<std::pair<int32_t, int32_t>>& waits() const {
    return waits_;
  }
  std::size_t num_resources() const {
    return resources_.size();
  }
  ResourceKind resource(int32_t index) const;

  // Throws std::invalid_argument for a resource or wait that does not exist, a
  // negative duration, durations whose sum exceeds 2^60 ns, and for tasks that
  // wait for each other in a circle (naming one of the circle).
  void check() const;

 private:
  std::vector<ResourceKind> resources_;
  std::vector<Task> tasks_;
  std::vector<std::pair<int32_t, int32_t>> waits_;
};

// Which tasks wait for each task, as one flat array.
class Followers {
 public:
  explicit Followers(const TaskGraph& graph);

  const int32_t* begin(int32_t task) const {
    return tasks_.data() + offsets_[static_cast<std::size_t>(task)];
  }
  const int32_t* end(int32_t task) const {
    return tasks_.data() + offsets_[static_cast<std::size_t>(task) + 1];
  }
  // How many tasks each task waits for.
  const std::vector<int32_t>& num_waits() const {
    return num_waits_;
  }

 private:
  std::vector<std::size_t> offsets_;
  std::vector<int32_t> tasks_;
  std::vector<int32_t> num_waits_;
};

}  // namespace pipetransformer::simulator
