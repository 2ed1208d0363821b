// Stress of the torch-free engine (WorkerPool, Execution, schedules), meant for
// the sanitizers: random schedules on random pools, failures at any operation,
// cancelled and dropped runs, polls that throw, spare work in between, shutdown
// races, fork.
//
//   stress_execution SEED ROUNDS
//
// What operations hand to each other is plain memory, so a missing wait is a
// data race. Prints what failed and returns 1, or returns 0.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pipe/execution.h"
#include "planner/schedule/schedules.h"

namespace {

using namespace pipetransformer;
using pipe::Dispatch;
using pipe::Execution;
using pipe::WorkerPool;
using planner::Op;
using planner::OpKind;
using planner::Schedule;

std::atomic<int> num_failures{0};
std::mt19937 source;

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    ++num_failures;
  }
}

int draw(int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(source);
}

struct OpFailure : std::runtime_error {
  OpFailure(int32_t at_clock, int32_t at_stage)
      : std::runtime_error("op"), clock(at_clock), stage(at_stage) {}
  int32_t clock;
  int32_t stage;
};

struct PollFailure {};

const Execution::Poll kNoPoll = [] {};

std::shared_ptr<const Schedule> draw_schedule() {
  planner::ScheduleShape shape;
  shape.num_stages = draw(1, 5);
  shape.num_microbatches = draw(1, 8);
  shape.num_recomputed = draw(0, shape.num_microbatches);
  shape.first_stage = draw(0, 2) > 0 ? 0 : draw(0, shape.num_stages);
  planner::LinkRules rules;
  rules.at_most_one_ahead = draw(0, 3) > 0;
  rules.early_recompute = draw(0, 1) > 0;
  static const char* const kNames[] = {"gpipe", "1f1b", "zb-h1"};
  const int kind = draw(0, 4);
  if (kind == 3) {
    return std::make_shared<Schedule>(planner::forward_pass(shape, rules));
  }
  if (kind == 4) {
    return std::make_shared<Schedule>(planner::gpipe_backward(shape, rules));
  }
  return std::make_shared<Schedule>(
      planner::make_schedule(kNames[kind], shape, rules));
}

// What the operations of one run do: read what the operations they depend on
// have written, write their own. Nothing is atomic on purpose.
struct Cells {
  explicit Cells(const Schedule& lists) : schedule(lists) {
    for (const auto& ops : lists) {
      for (const Op& op : ops) {
        num_microbatches = std::max(num_microbatches, op.microbatch + 1);
      }
    }
    values.resize(lists.size() * num_microbatches);
    running.resize(lists.size());
  }

  // How often an operation of a cell has run.
  int& at(int stage, int microbatch, OpKind kind) {
    static const std::string kinds = "FRBIW";
    return values[stage * num_microbatches + microbatch]
                 [kinds.find(static_cast<char>(kind))];
  }

  void run(int32_t stage, const Op& op) {
    check(running[stage] == 0, "a stage runs one operation at a time");
    running[stage] = 1;
    ++num_run;
    read_inputs(stage, op);
    if (fail_at.count({op.clock, stage}) > 0) {
      running[stage] = 0;
      throw OpFailure(op.clock, stage);
    }
    at(stage, op.microbatch, op.kind) += 1;
    running[stage] = 0;
  }

  void read_inputs(int32_t stage, const Op& op) {
    const auto last = static_cast<int32_t>(schedule.size()) - 1;
    if (op.kind == OpKind::kForward && stage > 0) {
      check(
          at(stage - 1, op.microbatch, OpKind::kForward) == 1,
          "F has its input");
    }
    const bool down =
        op.kind == OpKind::kBackward || op.kind == OpKind::kInputGrad;
    if (down && stage < last) {
      const int num_above = at(stage + 1, op.microbatch, OpKind::kBackward) +
                            at(stage + 1, op.microbatch, OpKind::kInputGrad);
      check(num_above == 1, "B has its gradient");
    }
    if (op.kind == OpKind::kWeightGrad) {
      check(
          at(stage, op.microbatch, OpKind::kInputGrad) == 1, "W comes after I");
    }
  }

  const Schedule& schedule;
  int num_microbatches = 0;
  std::vector<std::array<int, 5>> values;         // by stage, then micro-batch
  std::vector<int> running;                       // by stage
  std::set<std::pair<int32_t, int32_t>> fail_at;  // (clock, stage)
  std::atomic<int> num_run{0};
  std::atomic<int> num_inside{0};  // threads that work for this run
};

int num_ops(const Schedule& schedule) {
  int count = 0;
  for (const auto& ops : schedule) {
    count += static_cast<int>(ops.size());
  }
  return count;
}

Dispatch draw_dispatch(const Schedule& schedule, const WorkerPool& pool) {
  const bool fits = static_cast<int>(schedule.size()) <= pool.num_workers();
  return fits && draw(0, 2) > 0 ? Dispatch::kThreads : Dispatch::kSerial;
}

Execution::Body body_of(
    const std::shared_ptr<Cells>& cells,
    const std::shared_ptr<const Schedule>& schedule,
    bool together = false) {
  Execution::Body body;
  body.run = [cells, schedule](int32_t stage, const Op& op) {
    cells->run(stage, op);
  };
  const bool backward_only =
      std::all_of(schedule->begin(), schedule->end(), [](const auto& ops) {
        return ops.empty() || ops.front().kind != OpKind::kForward;
      });
  if (together && backward_only) {
    body.groups = planner::backward_columns(*schedule, draw(0, 1) > 0);
    body.run_together = [cells](auto group) {  // any order that is one
      std::sort(group.begin(), group.end(), [](const auto& a, const auto& b) {
        return a.op->clock < b.op->clock;
      });
      for (const auto& [stage, op] : group) {
        cells->run(stage, *op);
      }
    };
  }
  body.enter = [cells] {
    ++cells->num_inside;
    return std::shared_ptr<void>(
        nullptr, [cells](void*) { --cells->num_inside; });
  };
  return body;
}

std::shared_ptr<Execution> start(
    WorkerPool& pool,
    const std::shared_ptr<const Schedule>& schedule,
    const std::shared_ptr<Cells>& cells,
    bool together = false) {
  return Execution::start(
      pool,
      schedule,
      draw_dispatch(*schedule, pool),
      body_of(cells, schedule, together));
}

void run_to_the_end(WorkerPool& pool) {
  const auto schedule = draw_schedule();
  const auto cells = std::make_shared<Cells>(*schedule);
  const auto run = start(pool, schedule, cells, draw(0, 1) > 0);
  const auto stage = draw(0, static_cast<int>(schedule->size()) - 1);
  run->wait_stage(stage, kNoPoll);
  for (const Op& op : (*schedule)[stage]) {
    check(
        cells->at(stage, op.microbatch, op.kind) == 1,
        "a stage that was waited for is over");
  }
  run->wait_all(kNoPoll);
  check(cells->num_run == num_ops(*schedule), "every operation has run");
  // The one dispatcher leaves a moment after the caller has been told.
  for (int k = 0; k < 1'000'000 && cells->num_inside > 0; ++k) {
    std::this_thread::yield();
  }
  check(cells->num_inside == 0, "every thread has left what it entered");
}

void run_with_failures(WorkerPool& pool) {
  const auto schedule = draw_schedule();
  if (num_ops(*schedule) == 0) {
    return;
  }
  const auto cells = std::make_shared<Cells>(*schedule);
  std::pair<int32_t, int32_t> first{INT32_MAX, 0};
  for (int k = draw(1, 3); k > 0; --k) {
    const auto stage = draw(0, static_cast<int>(schedule->size()) - 1);
    const auto& ops = (*schedule)[stage];
    if (!ops.empty()) {
      const Op& op = ops[draw(0, static_cast<int>(ops.size()) - 1)];
      cells->fail_at.insert({op.clock, stage});
      first = std::min(first, {op.clock, stage});
    }
  }
  if (cells->fail_at.empty()) {
    return;
  }
  const auto run = start(pool, schedule, cells);
  try {
    run->wait_all(kNoPoll);
    check(false, "a failure reaches the caller");
  } catch (const OpFailure& failure) {
    check(
        failure.clock == first.first && failure.stage == first.second,
        "the failure with the lowest clock and stage wins");
    int expected = 0;
    for (const auto& ops : *schedule) {
      expected += static_cast<int>(
          std::count_if(ops.begin(), ops.end(), [&](const Op& op) {
            return op.clock < first.first;
          }));
    }
    check(cells->num_run >= expected, "earlier operations have run");
  }
  const int before = cells->num_run;
  std::this_thread::yield();
  check(cells->num_run == before, "nothing runs after the wait");
}

void cancel_or_drop(WorkerPool& pool) {
  const auto schedule = draw_schedule();
  const auto cells = std::make_shared<Cells>(*schedule);
  auto run = start(pool, schedule, cells);
  for (int k = draw(0, 200); k > 0; --k) {
    std::this_thread::yield();
  }
  if (draw(0, 1) > 0) {
    run->cancel();
    if (draw(0, 1) > 0) {
      run->wait_all(kNoPoll);
    }
  }
  run.reset();  // the tasks keep what they need
}

void poll_that_throws(WorkerPool& pool) {
  const auto schedule = std::make_shared<Schedule>(
      planner::forward_pass({/*num_microbatches=*/6, 1, 0, 0}));
  const auto num_run = std::make_shared<std::atomic<int>>(0);
  const auto run = Execution::start(
      pool, schedule, Dispatch::kThreads, {[num_run](int32_t, const Op&) {
        ++*num_run;
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
      }});
  bool thrown = false;
  try {
    run->wait_all([] { throw PollFailure(); });
  } catch (const PollFailure&) {
    thrown = true;
  }
  const int before = *num_run;
  std::this_thread::sleep_for(std::chrono::milliseconds(70));
  check(thrown && before < 6, "a poll that throws ends the wait and the run");
  check(*num_run == before, "nothing runs after the wait");
}

// Several callers on one pool: runs never interleave so that they deadlock.
void several_callers(WorkerPool& pool) {
  std::vector<std::thread> callers;
  for (int k = draw(2, 4); k > 0; --k) {
    const auto schedule = draw_schedule();
    const auto dispatch = draw_dispatch(*schedule, pool);
    callers.emplace_back([&pool, schedule, dispatch] {
      for (int round = 0; round < 3; ++round) {
        const auto fresh = std::make_shared<Cells>(*schedule);
        Execution::start(pool, schedule, dispatch, body_of(fresh, schedule))
            ->wait_all(kNoPoll);
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
}

// Spare work in pieces that follow each other, whichever thread runs them.
struct Chain {
  const int length;
  int num_run = 0;  // not atomic on purpose
};

using Count = std::shared_ptr<std::atomic<int>>;

void add_piece(
    WorkerPool& pool,
    const std::shared_ptr<Chain>& chain,
    const Count& num_over) {
  pool.add_spare({[&pool, chain, num_over] {
    if (++chain->num_run == chain->length) {
      ++*num_over;
    } else {
      add_piece(pool, chain, num_over);
    }
  }});
}

int add_chains(WorkerPool& pool, const Count& num_over) {
  const int count = draw(0, 6);
  for (int k = 0; k < count; ++k) {
    add_piece(
        pool, std::make_shared<Chain>(Chain{.length = draw(1, 40)}), num_over);
  }
  return count;
}

// A worker that waits for another stage takes spare work meanwhile: the first
// stage waits until pieces have run, which only the second one's worker can do.
struct Gap {
  std::atomic<bool> begun{false};
  std::atomic<bool> over{false};
  std::atomic<int> num_run{0};  // pieces since the first stage has begun
};

void add_endless(WorkerPool& pool, const std::shared_ptr<Gap>& gap) {
  pool.add_spare({[&pool, gap] {
    gap->num_run += gap->begun ? 1 : 0;
    if (!gap->over) {
      add_endless(pool, gap);
    }
  }});
}

void spare_work_in_a_gap() {
  WorkerPool pool(2, {[] {}, [] {}});
  const auto gap = std::make_shared<Gap>();
  add_endless(pool, gap);
  const auto schedule =
      std::make_shared<Schedule>(planner::forward_pass({1, 2, 0, 0}));
  const auto run = Execution::start(
      pool, schedule, Dispatch::kThreads, {[gap](int32_t stage, const Op&) {
        if (stage == 0) {
          gap->begun = true;
          while (gap->num_run < 3) {
            std::this_thread::yield();
          }
          gap->over = true;
        }
      }});
  run->wait_all(kNoPoll);
  check(gap->num_run >= 3, "spare work runs in a gap");
}

// A pool that is given up runs to the end of an operation, not of a call.
void give_up_while_running() {
  WorkerPool pool(draw(1, 3), {[] {}, [] {}});
  const auto schedule = std::make_shared<Schedule>(
      planner::forward_pass({1000, pool.num_workers(), 0, 0}));
  const auto num_run = std::make_shared<std::atomic<int>>(0);
  const auto run = Execution::start(
      pool,
      schedule,
      draw_dispatch(*schedule, pool),
      {[num_run](int32_t, const Op&) {
        ++*num_run;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }});
  while (*num_run == 0) {
    std::this_thread::yield();
  }
  pool.give_up();
  pool.shutdown();
  check(*num_run < 1000, "a pool that is given up runs no call to its end");
  bool failed = false;
  try {
    run->wait_all(kNoPoll);
  } catch (const std::runtime_error& error) {
    failed = std::string(error.what()).find("interpreter") != std::string::npos;
  }
  check(failed, "a call on a pool that is given up fails");
}

// A pool that is shut down by one thread while others submit and look at it.
void shutdown_race() {
  WorkerPool pool(draw(1, 4), {[] {}, [] {}});
  const auto schedule = std::make_shared<Schedule>(
      planner::forward_pass({2, pool.num_workers(), 0, 0}));
  std::atomic<int> num_started{0};
  std::vector<std::thread> callers;
  for (int k = 0; k < 3; ++k) {
    callers.emplace_back([&] {
      try {
        for (int round = 0; round < 20; ++round) {
          const auto cells = std::make_shared<Cells>(*schedule);
          const auto run = Execution::start(
              pool, schedule, Dispatch::kThreads, body_of(cells, schedule));
          ++num_started;
          run->wait_all(kNoPoll);
          check(cells->num_run == num_ops(*schedule), "what was queued runs");
        }
      } catch (const std::runtime_error& closed) {
        check(
            std::string(closed.what()).find("closed") != std::string::npos,
            "a closed pool says so");
      }
    });
  }
  const Count num_over = std::make_shared<std::atomic<int>>(0);
  std::atomic<int> num_added{0};
  callers.emplace_back([&] {
    try {
      for (int k = 0; k < 200; ++k) {
        add_piece(pool, std::make_shared<Chain>(Chain{.length = 3}), num_over);
        ++num_added;
      }
    } catch (const std::runtime_error&) {  // closed
    }
  });
  callers.emplace_back([&] {
    pool.when_done();
    pool.cpu_seconds();
    pool.shutdown();
    pool.shutdown();
  });
  for (std::thread& caller : callers) {
    caller.join();
  }
  check(*num_over == num_added, "spare work that was taken runs to its end");
}

// The child of a fork has no such threads: its copy does nothing and frees
// nothing that they use.
void fork_while_running() {
  auto owner = std::make_unique<WorkerPool>(
      draw(1, 5), WorkerPool::ThreadHooks{[] {}, [] {}});
  WorkerPool& pool = *owner;
  const auto schedule = draw_schedule();
  const auto cells = std::make_shared<Cells>(*schedule);
  const auto run = start(pool, schedule, cells);
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      pool.submit({[] {}});
    } catch (const std::runtime_error&) {
      code = pool.when_done().empty() && pool.cpu_seconds().empty() ? 0 : 1;
    }
    try {
      pool.add_spare({[] {}});
      code = 1;
    } catch (const std::runtime_error&) {
    }
    pool.shutdown();
    owner.reset();  // joins nothing, frees nothing that threads use
    _exit(code);
  }
  int status = 1;
  check(waitpid(child, &status, 0) == child && status == 0, "inert after fork");
  run->wait_all(kNoPoll);
}

}  // namespace

int main(int argc, char** argv) {
  const int seed = argc > 1 ? std::atoi(argv[1]) : 0;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 200;
  source.seed(static_cast<unsigned>(seed));
  alarm(110);  // a hang ends the program with a signal
  for (int round = 0; round < rounds; ++round) {
    WorkerPool pool(draw(1, 5), {[] {}, [] {}});
    const Count num_over = std::make_shared<std::atomic<int>>(0);
    int num_chains = 0;
    for (int k = 0; k < 8; ++k) {
      num_chains += add_chains(pool, num_over);
      run_to_the_end(pool);
      run_with_failures(pool);
      cancel_or_drop(pool);
    }
    several_callers(pool);
    pool.shutdown();
    check(*num_over == num_chains, "all spare work runs before a pool closes");
    if (round % 10 == 0) {
      WorkerPool other(draw(1, 5), {[] {}, [] {}});
      poll_that_throws(other);
      spare_work_in_a_gap();
      give_up_while_running();
      shutdown_race();
      fork_while_running();
    }
  }
  std::printf("%d rounds, %d failures\n", rounds, num_failures.load());
  return num_failures == 0 ? 0 : 1;
}
