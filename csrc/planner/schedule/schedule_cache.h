// Schedules that were made before. Torch-free; thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "planner/schedule/schedules.h"

namespace pipetransformer::planner {

class ScheduleCache {
 public:
  enum class Part : uint8_t { kForward, kBackward, kWhole };

  // `name` counts for kWhole only. Throws what the builders throw.
  std::shared_ptr<const Schedule>
  get(Part part,
      const std::string& name,
      const ScheduleShape& shape,
      const LinkRules& rules);

 private:
  using Key = std::
      tuple<Part, std::string, int32_t, int32_t, int32_t, int32_t, bool, bool>;
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<const Schedule>> made_;
};

}  // namespace pipetransformer::planner
