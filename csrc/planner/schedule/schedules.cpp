#include "planner/schedule/schedules.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace pipetransformer::planner {

namespace {

void check_shape(const ScheduleShape& shape) {
  if (shape.num_microbatches < 1 || shape.num_stages < 1) {
    throw std::invalid_argument(
        "schedule: expected at least 1 micro-batch and 1 stage, got " +
        std::to_string(shape.num_microbatches) + " and " +
        std::to_string(shape.num_stages));
  }
  if (shape.first_stage < 0 || shape.first_stage > shape.num_stages) {
    throw std::invalid_argument(
        "schedule: expected a first stage from 0 to " +
        std::to_string(shape.num_stages) + ", got " +
        std::to_string(shape.first_stage));
  }
}

void push(StageOps& ops, OpKind kind, int32_t microbatch) {
  ops.push_back({kind, microbatch, 0, {}});
}

// B or I, with its R where the micro-batch is checkpointed.
void push_backward(
    StageOps& ops,
    OpKind kind,
    int32_t microbatch,
    const ScheduleShape& shape) {
  if (microbatch < shape.num_recomputed) {
    push(ops, OpKind::kRecompute, microbatch);
  }
  push(ops, kind, microbatch);
}

// Note [ZB-H1 by list scheduling]
// The lists are what greedy stages would do if F, I and W took one unit each
// and B two: a stage runs F and I in turns like 1F1B (at most num_stages - j
// forwards whose I has not run), and W when neither may run. F also waits while
// the activations of num_stages - first_stage micro-batches are kept, so W
// cannot be put off for ever. A test compares the length with the closed form.
class ZeroBubbleLists {
 public:
  explicit ZeroBubbleLists(const ScheduleShape& shape)
      : shape_(shape), stages_(shape.num_stages), lists_(shape.num_stages) {
    for (Stage& stage : stages_) {
      stage.forward_end.assign(shape.num_microbatches, kNever);
      stage.input_grad_end.assign(shape.num_microbatches, kNever);
    }
  }

  Schedule make() {
    for (int32_t now = 0; !done(); ++now) {
      for (int32_t j = 0; j < shape_.num_stages; ++j) {
        if (stages_[j].busy_until <= now) {
          step(j, now);
        }
      }
    }
    return std::move(lists_);
  }

 private:
  static constexpr int32_t kNever = INT32_MAX;
  struct Stage {
    int32_t busy_until = 0;
    int32_t num_forward = 0;
    int32_t num_input_grad = 0;
    int32_t num_weight_grad = 0;
    bool forward_turn = true;
    std::vector<int32_t> forward_end;
    std::vector<int32_t> input_grad_end;
  };

  bool done() const {
    for (int32_t j = 0; j < shape_.num_stages; ++j) {
      const int32_t reached =
          has_backward(j) ? stages_[j].num_weight_grad : stages_[j].num_forward;
      if (reached < shape_.num_microbatches) {
        return false;
      }
    }
    return true;
  }

  bool has_backward(int32_t j) const {
    return j >= shape_.first_stage;
  }

  bool may_forward(int32_t j, int32_t now) const {
    const Stage& stage = stages_[j];
    const int32_t next = stage.num_forward;
    if (next >= shape_.num_microbatches ||
        (j > 0 && stages_[j - 1].forward_end[next] > now)) {
      return false;
    }
    return !has_backward(j) ||
           (next - stage.num_input_grad < shape_.num_stages - j &&
            next - stage.num_weight_grad <
                shape_.num_stages - shape_.first_stage);
  }

  bool may_backward(int32_t j, int32_t now) const {
    const Stage& stage = stages_[j];
    const int32_t next = stage.num_input_grad;
    if (!has_backward(j) || next >= stage.num_forward) {
      return false;
    }
    return j + 1 == shape_.num_stages ||
           stages_[j + 1].input_grad_end[next] <= now;
  }

  void step(int32_t j, int32_t now) {
    Stage& stage = stages_[j];
    const bool forward = may_forward(j, now);
    const bool backward = may_backward(j, now);
    if (forward && (stage.forward_turn || !backward)) {
      stage.forward_end[stage.num_forward] = stage.busy_until = now + 1;
      push(lists_[j], OpKind::kForward, stage.num_forward++);
      stage.forward_turn = false;
    } else if (backward) {
      const bool whole = j == shape_.first_stage;
      stage.busy_until = now + (whole ? 2 : 1);
      stage.input_grad_end[stage.num_input_grad] = stage.busy_until;
      push_backward(
          lists_[j],
          whole ? OpKind::kBackward : OpKind::kInputGrad,
          stage.num_input_grad++,
          shape_);
      stage.num_weight_grad += whole ? 1 : 0;
      stage.forward_turn = true;
    } else if (stage.num_weight_grad < stage.num_input_grad) {
      stage.busy_until = now + 1;
      push(lists_[j], OpKind::kWeightGrad, stage.num_weight_grad++);
    }
  }

  const ScheduleShape shape_;
  std::vector<Stage> stages_;
  Schedule lists_;
};

}  // namespace

Schedule forward_pass(const ScheduleShape& shape, const LinkRules& rules) {
  check_shape(shape);
  Schedule schedule(shape.num_stages);
  for (StageOps& ops : schedule) {
    for (int32_t i = 0; i < shape.num_microbatches; ++i) {
      push(ops, OpKind::kForward, i);
    }
  }
  link(schedule, rules);
  return schedule;
}

Schedule gpipe_backward(const ScheduleShape& shape, const LinkRules& rules) {
  check_shape(shape);
  Schedule schedule(shape.num_stages);
  ScheduleShape plain = shape;
  if (!rules.at_most_one_ahead) {
    plain.num_recomputed = 0;
  }
  for (int32_t j = shape.first_stage; j < shape.num_stages; ++j) {
    for (int32_t i = shape.num_recomputed - 1;
         i >= 0 && !rules.at_most_one_ahead;
         --i) {
      push(schedule[j], OpKind::kRecompute, i);
    }
    for (int32_t i = shape.num_microbatches - 1; i >= 0; --i) {
      push_backward(schedule[j], OpKind::kBackward, i, plain);
    }
  }
  link(schedule, rules);
  return schedule;
}

Schedule one_f_one_b(const ScheduleShape& shape, const LinkRules& rules) {
  check_shape(shape);
  const int32_t count = shape.num_microbatches;
  Schedule schedule(shape.num_stages);
  for (int32_t j = 0; j < shape.num_stages; ++j) {
    StageOps& ops = schedule[j];
    const bool backward = j >= shape.first_stage;
    const int32_t ahead =
        backward ? std::min(count, shape.num_stages - j) : count;
    for (int32_t i = 0; i < ahead; ++i) {
      push(ops, OpKind::kForward, i);
    }
    for (int32_t i = 0; i < count && backward; ++i) {
      push_backward(ops, OpKind::kBackward, i, shape);
      if (ahead + i < count) {
        push(ops, OpKind::kForward, ahead + i);
      }
    }
  }
  link(schedule, rules);
  return schedule;
}

Schedule zb_h1(const ScheduleShape& shape, const LinkRules& rules) {
  check_shape(shape);
  Schedule schedule = ZeroBubbleLists(shape).make();
  link(schedule, rules);
  return schedule;
}

Schedule make_schedule(
    const std::string& name,
    const ScheduleShape& shape,
    const LinkRules& rules) {
  if (name == "1f1b") {
    return one_f_one_b(shape, rules);
  }
  if (name == "zb-h1") {
    return zb_h1(shape, rules);
  }
  if (name != "gpipe") {
    throw std::invalid_argument(
        "schedule: expected 'gpipe', '1f1b' or 'zb-h1', got '" + name + "'");
  }
  Schedule schedule = forward_pass(shape, rules);
  const Schedule backward = gpipe_backward(shape, rules);
  for (std::size_t j = 0; j < schedule.size(); ++j) {
    schedule[j].insert(
        schedule[j].end(), backward[j].begin(), backward[j].end());
  }
  link(schedule, rules);
  return schedule;
}

}  // namespace pipetransformer::planner
