#include "pipe/schedule_order.h"

#include <stdexcept>

namespace pipetransformer::pipe {

namespace {

void check_counts(int32_t num_microbatches, int32_t num_stages) {
  if (num_microbatches < 1 || num_stages < 1) {
    throw std::invalid_argument(
        "schedule: expected at least 1 micro-batch and 1 stage, got " +
        std::to_string(num_microbatches) + " and " +
        std::to_string(num_stages));
  }
}

}  // namespace

ScheduleOrder gpipe_forward(int32_t num_microbatches, int32_t num_stages) {
  check_counts(num_microbatches, num_stages);
  ScheduleOrder order(num_stages);
  for (int32_t j = 0; j < num_stages; ++j) {
    for (int32_t i = 0; i < num_microbatches; ++i) {
      Op op{OpKind::kForward, i, i + j, {}};
      if (j > 0) {
        op.waits.push_back({j - 1, i + 1});
      }
      if (j + 1 < num_stages && i >= 2) {
        op.waits.push_back({j + 1, i - 1});
      }
      order[j].push_back(std::move(op));
    }
  }
  return order;
}

ScheduleOrder gpipe_backward(
    int32_t num_microbatches,
    int32_t num_stages,
    int32_t num_recomputed,
    int32_t first_stage) {
  check_counts(num_microbatches, num_stages);
  ScheduleOrder order(num_stages);
  for (int32_t j = first_stage; j < num_stages; ++j) {
    int32_t next_done = 0;  // operations of stage j+1 up to its B of this turn
    for (int32_t i = num_microbatches - 1; i >= 0; --i) {
      const int32_t clock = (num_microbatches - 1 - i) + (num_stages - 1 - j);
      const bool recomputed = i < num_recomputed;
      next_done += recomputed ? 2 : 1;
      if (recomputed) {
        order[j].push_back({OpKind::kRecompute, i, clock, {}});
      }
      Op op{OpKind::kBackward, i, clock, {}};
      if (j + 1 < num_stages) {
        op.waits.push_back({j + 1, next_done});
      }
      order[j].push_back(std::move(op));
    }
  }
  return order;
}

std::string to_string(const ScheduleOrder& order) {
  std::string text;
  for (std::size_t j = 0; j < order.size(); ++j) {
    text += std::to_string(j) + ":";
    for (const Op& op : order[j]) {
      text += ' ';
      text += static_cast<char>(op.kind);
      text += std::to_string(op.microbatch);
    }
    text += '\n';
  }
  return text;
}

void check_order(const ScheduleOrder& order) {
  for (std::size_t j = 0; j < order.size(); ++j) {
    for (std::size_t k = 0; k < order[j].size(); ++k) {
      const Op& op = order[j][k];
      bool valid = k == 0 || order[j][k - 1].clock <= op.clock;
      for (const StageProgress& wait : op.waits) {
        const auto stage = static_cast<std::size_t>(wait.stage);
        const auto last = static_cast<std::size_t>(wait.count) - 1;
        valid = valid && wait.count > 0 && stage < order.size() && stage != j &&
                last < order[stage].size() &&
                order[stage][last].clock < op.clock;
      }
      if (!valid) {
        throw std::logic_error(
            "schedule: expected every wait to name an earlier operation, got "
            "operation " +
            std::to_string(k) + " of stage " + std::to_string(j) + " in\n" +
            to_string(order));
      }
    }
  }
}

}  // namespace pipetransformer::pipe
