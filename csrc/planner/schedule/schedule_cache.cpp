#include "planner/schedule/schedule_cache.h"

namespace pipetransformer::planner {

namespace {

// A user with ever new batch sizes must not fill the memory.
constexpr std::size_t kMaxEntries = 64;

}  // namespace

std::shared_ptr<const Schedule> ScheduleCache::get(
    Part part,
    const std::string& name,
    const ScheduleShape& shape,
    const LinkRules& rules) {
  const std::lock_guard lock(mutex_);
  const Key key{
      part,
      name,
      shape.num_microbatches,
      shape.num_stages,
      shape.num_recomputed,
      shape.first_stage,
      rules.at_most_one_ahead,
      rules.early_recompute};
  const auto found = made_.find(key);
  if (found != made_.end()) {
    return found->second;
  }
  Schedule schedule = part == Part::kForward ? forward_pass(shape, rules)
                      : part == Part::kBackward
                          ? gpipe_backward(shape, rules)
                          : make_schedule(name, shape, rules);
  if (made_.size() >= kMaxEntries) {
    made_.clear();
  }
  return made_[key] = std::make_shared<const Schedule>(std::move(schedule));
}

}  // namespace pipetransformer::planner
