#include "simulator/sharing.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace pipetransformer::simulator {

namespace {

using Wide = __int128;

// From replayed to real time, piecewise linear: entry i holds what the time up
// to `at[i]` takes.
class Stretched {
 public:
  Stretched(
      std::vector<std::pair<int64_t, int32_t>> changes,
      const Sharing& sharing) {
    std::sort(changes.begin(), changes.end());
    int64_t working = 0;
    at_.push_back(0);
    takes_.push_back(0);
    factor_.push_back(kWhole);
    for (std::size_t i = 0; i < changes.size();) {
      const int64_t now = changes[i].first;
      for (; i < changes.size() && changes[i].first == now; ++i) {
        working += changes[i].second;
      }
      const int64_t passed = real(now);
      at_.push_back(now);
      takes_.push_back(passed);
      factor_.push_back(std::max(
          kWhole,
          working * sharing.replicas_each * kWhole * kWhole /
              sharing.cores_permille));
    }
  }

  int64_t real(int64_t time_ns) const {
    const auto next = std::upper_bound(at_.begin(), at_.end(), time_ns);
    const auto i = static_cast<std::size_t>(next - at_.begin()) - 1;
    const Wide scaled = Wide{time_ns - at_[i]} * factor_[i];
    return takes_[i] + static_cast<int64_t>((scaled + kWhole - 1) / kWhole);
  }

 private:
  static constexpr int64_t kWhole = 1000;

  std::vector<int64_t> at_;
  std::vector<int64_t> takes_;
  std::vector<int64_t> factor_;  // from `at` on, in thousandths
};

// What is left of the fill work runs beside grains that end behind the last
// task: so these are part of it.
void leave_what_overruns(Replay& replay) {
  int64_t last_ns = 0;
  for (const Span& span : replay.spans) {
    last_ns = std::max(last_ns, span.end_ns);
  }
  for (FillSpan& span : replay.fills) {
    const int64_t over_ns = std::max<int64_t>(0, span.end_ns - last_ns);
    span.end_ns -= over_ns;
    replay.fill_left_ns += over_ns;
  }
}

}  // namespace

void share_cores(
    Replay& replay,
    const StepTasks& tasks,
    const Sharing& sharing) {
  if (sharing.cores_permille == 0) {
    return;
  }
  if (replay.fill_left_ns > 0) {
    leave_what_overruns(replay);
  }
  std::vector<std::pair<int64_t, int32_t>> changes;
  const auto note = [&changes](int64_t begin_ns, int64_t end_ns) {
    if (begin_ns < end_ns) {
      changes.emplace_back(begin_ns, 1);
      changes.emplace_back(end_ns, -1);
    }
  };
  for (const Span& span : replay.spans) {
    const Task& task = tasks.graph.tasks()[static_cast<std::size_t>(span.task)];
    const bool reads = task.kind == TaskKind::kCacheRead;
    if (tasks.graph.resource(task.resource) == ResourceKind::kCompute ||
        (reads && sharing.reads_compute)) {
      note(span.begin_ns, span.end_ns);
    }
  }
  for (const FillSpan& span : replay.fills) {
    note(span.begin_ns, span.end_ns);
  }
  const Stretched stretched(std::move(changes), sharing);
  for (Span& span : replay.spans) {
    span.begin_ns = stretched.real(span.begin_ns);
    span.end_ns = stretched.real(span.end_ns);
  }
  for (FillSpan& span : replay.fills) {
    span.begin_ns = stretched.real(span.begin_ns);
    span.end_ns = stretched.real(span.end_ns);
  }
  // What is left runs on all devices at once.
  const auto devices = static_cast<int64_t>(tasks.fill.resources.size());
  const int64_t working = devices * sharing.replicas_each * 1000;
  if (working > sharing.cores_permille) {
    replay.fill_left_ns = static_cast<int64_t>(
        Wide{replay.fill_left_ns} * working / sharing.cores_permille);
  }
}

}  // namespace pipetransformer::simulator
