#include "planner/schedule/schedule.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace pipetransformer::planner {

namespace {

bool gives_input_grad(OpKind kind) {
  return kind == OpKind::kBackward || kind == OpKind::kInputGrad;
}

std::string name_of(const Op& op) {
  return static_cast<char>(op.kind) + std::to_string(op.microbatch);
}

[[noreturn]] void refuse(
    const Schedule& schedule,
    std::size_t stage,
    const Op& op,
    const std::string& expected) {
  throw std::invalid_argument(
      "schedule: stage " + std::to_string(stage) + ", operation " +
      name_of(op) + ": expected " + expected + ", got\n" + to_string(schedule));
}

// Where each operation of each stage is in its list.
class Positions {
 public:
  explicit Positions(const Schedule& schedule) : by_stage_(schedule.size()) {
    for (std::size_t j = 0; j < schedule.size(); ++j) {
      for (std::size_t k = 0; k < schedule[j].size(); ++k) {
        const Op& op = schedule[j][k];
        // B and I both are the operation that hands a gradient down.
        if (op.microbatch < 0 ||
            !by_stage_[j].emplace(key(op.kind, op.microbatch), k).second) {
          refuse(schedule, j, op, "each micro-batch once");
        }
      }
    }
  }

  // Index in the list, or -1.
  int32_t find(std::size_t stage, OpKind kind, int32_t microbatch) const {
    const auto found = by_stage_[stage].find(key(kind, microbatch));
    return found == by_stage_[stage].end()
               ? -1
               : static_cast<int32_t>(found->second);
  }

 private:
  using Key = std::pair<char, int32_t>;
  static Key key(OpKind kind, int32_t microbatch) {
    const OpKind known = kind == OpKind::kInputGrad ? OpKind::kBackward : kind;
    return {static_cast<char>(known), microbatch};
  }
  std::vector<std::map<Key, std::size_t>> by_stage_;
};

class Linker {
 public:
  Linker(Schedule& schedule, const LinkRules& rules)
      : schedule_(schedule), rules_(rules), positions_(schedule) {}

  void link() {
    for (std::size_t j = 0; j < schedule_.size(); ++j) {
      for (std::size_t k = 0; k < schedule_[j].size(); ++k) {
        link_op(j, static_cast<int32_t>(k));
      }
    }
    set_clocks();
  }

 private:
  void link_op(std::size_t stage, int32_t index) {
    Op& op = schedule_[stage][index];
    op.waits.clear();
    switch (op.kind) {
      case OpKind::kForward:
        link_forward(stage, op);
        break;
      case OpKind::kRecompute:
        need_earlier(stage, op, index, OpKind::kForward);
        if (!rules_.early_recompute) {
          wait_for_gradient(stage, op);
        }
        break;
      case OpKind::kBackward:
      case OpKind::kInputGrad:
        need_earlier(stage, op, index, OpKind::kForward);
        need_earlier(stage, op, index, OpKind::kRecompute);
        wait_for_gradient(stage, op);
        break;
      case OpKind::kWeightGrad:
        if (positions_.find(stage, OpKind::kInputGrad, op.microbatch) < 0) {
          refuse(schedule_, stage, op, "the I of its micro-batch before it");
        }
        need_earlier(stage, op, index, OpKind::kInputGrad);
        break;
    }
  }

  void link_forward(std::size_t stage, Op& op) {
    if (stage > 0) {
      const int32_t before =
          positions_.find(stage - 1, OpKind::kForward, op.microbatch);
      if (before < 0) {
        refuse(schedule_, stage, op, "the F of the stage before it");
      }
      op.waits.push_back({static_cast<int32_t>(stage) - 1, before + 1});
    }
    if (rules_.at_most_one_ahead && stage + 1 < schedule_.size() &&
        op.microbatch >= 2) {
      const int32_t after =
          positions_.find(stage + 1, OpKind::kForward, op.microbatch - 2);
      if (after >= 0) {
        op.waits.push_back({static_cast<int32_t>(stage) + 1, after + 1});
      }
    }
  }

  void wait_for_gradient(std::size_t stage, Op& op) {
    if (stage + 1 == schedule_.size()) {
      return;
    }
    const int32_t above =
        positions_.find(stage + 1, OpKind::kBackward, op.microbatch);
    if (above < 0) {
      refuse(schedule_, stage, op, "a B or I of the stage after it");
    }
    op.waits.push_back({static_cast<int32_t>(stage) + 1, above + 1});
  }

  // Where the list has that operation at all, it comes first.
  void need_earlier(std::size_t stage, const Op& op, int32_t index, OpKind kind)
      const {
    if (positions_.find(stage, kind, op.microbatch) > index) {
      refuse(
          schedule_,
          stage,
          op,
          std::string("the ") + static_cast<char>(kind) +
              " of its micro-batch before it");
    }
  }

  // Rounds over the stages, each as far as it gets: every round that ends
  // before the lists do makes progress, or there is a circle.
  void set_clocks() {
    std::vector<std::size_t> next(schedule_.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t j = 0; j < schedule_.size(); ++j) {
        while (next[j] < schedule_[j].size() && set_clock(j, next)) {
          ++next[j];
          moved = true;
        }
      }
    }
    for (std::size_t j = 0; j < schedule_.size(); ++j) {
      if (next[j] < schedule_[j].size()) {
        refuse(
            schedule_,
            j,
            schedule_[j][next[j]],
            "no operations that wait for each other");
      }
    }
  }

  // False while something that it waits for has no clock yet.
  bool set_clock(std::size_t stage, const std::vector<std::size_t>& next) {
    Op& op = schedule_[stage][next[stage]];
    int32_t clock =
        next[stage] == 0 ? 0 : schedule_[stage][next[stage] - 1].clock + 1;
    for (const StageProgress& wait : op.waits) {
      if (next[wait.stage] < static_cast<std::size_t>(wait.count)) {
        return false;
      }
      clock = std::max(clock, schedule_[wait.stage][wait.count - 1].clock + 1);
    }
    op.clock = clock;
    return true;
  }

  Schedule& schedule_;
  const LinkRules rules_;
  const Positions positions_;
};

[[noreturn]] void refuse_text(std::size_t line, std::string_view text) {
  throw std::invalid_argument(
      "schedule, line " + std::to_string(line) +
      ": expected 'STAGE: ' and operations such as F0, got '" +
      std::string(text) + "'");
}

bool read_number(std::string_view text, int32_t& number) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number);
  return !text.empty() && result.ec == std::errc() && result.ptr == end &&
         number >= 0;
}

StageOps parse_line(std::string_view text, std::size_t line) {
  const std::size_t colon = text.find(':');
  int32_t stage = 0;
  if (colon == std::string_view::npos ||
      !read_number(text.substr(0, colon), stage) ||
      static_cast<std::size_t>(stage) != line) {
    refuse_text(line, text);
  }
  StageOps ops;
  std::string_view rest = text.substr(colon + 1);
  while (!rest.empty()) {
    if (rest.front() == ' ') {
      rest.remove_prefix(1);
      continue;
    }
    const std::string_view word = rest.substr(0, rest.find(' '));
    Op op;
    op.kind = static_cast<OpKind>(word.front());
    if (std::string_view("FRBIW").find(word.front()) ==
            std::string_view::npos ||
        !read_number(word.substr(1), op.microbatch)) {
      refuse_text(line, text);
    }
    ops.push_back(std::move(op));
    rest.remove_prefix(word.size());
  }
  return ops;
}

}  // namespace

void link(Schedule& schedule, const LinkRules& rules) {
  Linker(schedule, rules).link();
}

std::string to_string(const Schedule& schedule) {
  std::string text;
  for (std::size_t j = 0; j < schedule.size(); ++j) {
    text += std::to_string(j) + ":";
    for (const Op& op : schedule[j]) {
      text += ' ' + name_of(op);
    }
    text += '\n';
  }
  return text;
}

Schedule parse_schedule(std::string_view text) {
  Schedule schedule;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    schedule.push_back(parse_line(text.substr(0, end), schedule.size()));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  link(schedule);
  return schedule;
}

void check_linked(const Schedule& schedule) {
  for (std::size_t j = 0; j < schedule.size(); ++j) {
    for (std::size_t k = 0; k < schedule[j].size(); ++k) {
      const Op& op = schedule[j][k];
      bool valid = k == 0 || schedule[j][k - 1].clock < op.clock;
      for (const StageProgress& wait : op.waits) {
        const auto stage = static_cast<std::size_t>(wait.stage);
        const auto last = static_cast<std::size_t>(wait.count) - 1;
        valid = valid && wait.count > 0 && stage < schedule.size() &&
                stage != j && last < schedule[stage].size() &&
                schedule[stage][last].clock < op.clock;
      }
      if (!valid) {
        throw std::logic_error(
            "schedule: expected every wait to name an earlier operation, got "
            "operation " +
            std::to_string(k) + " of stage " + std::to_string(j) + " in\n" +
            to_string(schedule));
      }
    }
  }
}

std::vector<StageOp> serial_order(const Schedule& schedule) {
  std::vector<StageOp> order;
  for (std::size_t j = 0; j < schedule.size(); ++j) {
    for (std::size_t k = 0; k < schedule[j].size(); ++k) {
      order.push_back({static_cast<int32_t>(j), static_cast<int32_t>(k)});
    }
  }
  const auto key = [&schedule](const StageOp& at) {
    const Op& op = schedule[at.stage][at.index];
    const bool forward = op.kind == OpKind::kForward;
    return std::tuple(op.clock, !forward, forward ? at.stage : -at.stage);
  };
  std::sort(
      order.begin(), order.end(), [&key](const StageOp& a, const StageOp& b) {
        return key(a) < key(b);
      });
  return order;
}

std::vector<std::vector<StageOp>>
backward_columns(const Schedule& schedule, bool apart) {
  std::map<int32_t, std::size_t> columns;
  for (const Op& op : schedule.back()) {
    if (op.kind == OpKind::kRecompute) {
      apart = true;
    } else {
      columns.emplace(op.microbatch, columns.size());
    }
  }
  std::vector<std::vector<StageOp>> groups(apart ? columns.size() : 1);
  for (const bool recompute : {true, false}) {
    for (std::size_t j = 0; j < schedule.size(); ++j) {
      for (std::size_t k = 0; k < schedule[j].size(); ++k) {
        const Op& op = schedule[j][k];
        if ((op.kind == OpKind::kRecompute) == recompute) {
          groups[apart ? columns.at(op.microbatch) : 0].push_back(
              {static_cast<int32_t>(j), static_cast<int32_t>(k)});
        }
      }
    }
  }
  return groups;
}

std::vector<int32_t> peak_live_microbatches(const Schedule& schedule) {
  std::vector<int32_t> peaks;
  for (std::size_t j = 0; j < schedule.size(); ++j) {
    const Positions positions({schedule[j]});
    int32_t live = 0;
    int32_t peak = 0;
    for (const Op& op : schedule[j]) {
      const auto has = [&](OpKind kind) {
        return positions.find(0, kind, op.microbatch) >= 0;
      };
      if (op.kind == OpKind::kRecompute ||
          (op.kind == OpKind::kForward && !has(OpKind::kRecompute) &&
           has(OpKind::kBackward))) {
        peak = std::max(peak, ++live);
      } else if (
          op.kind == OpKind::kWeightGrad ||
          (gives_input_grad(op.kind) && !has(OpKind::kWeightGrad))) {
        --live;
      }
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace pipetransformer::planner
