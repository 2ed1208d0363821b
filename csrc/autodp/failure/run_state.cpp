#include "autodp/failure/run_state.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace pipetransformer::autodp {

namespace {

std::shared_ptr<const Generation>
make_generation(int64_t number, std::vector<int> members, int64_t epoch) {
  auto generation = std::make_shared<Generation>();
  generation->number = number;
  generation->members = std::move(members);
  std::sort(generation->members.begin(), generation->members.end());
  generation->latch = std::make_shared<FailureLatch>();
  generation->latch->set_epoch(epoch);
  return generation;
}

}  // namespace

std::string Generation::key(const std::string& name) const {
  return "gen/" + std::to_string(number) + "/" + name;
}

RunState::RunState(int rank, const std::vector<int>& members, bool survives)
    : rank_(rank),
      survives_(survives),
      generation_(make_generation(0, members, -1)) {}

std::shared_ptr<const Generation> RunState::generation() const {
  const std::lock_guard lock(mutex_);
  return generation_;
}

void RunState::advance(const std::vector<int>& members) {
  if (std::find(members.begin(), members.end(), rank_) == members.end()) {
    throw std::invalid_argument(
        "members: expected rank " + std::to_string(rank_) +
        " among the next generation, got a list without it");
  }
  std::shared_ptr<const Generation> next;
  std::optional<Failure> end;
  {
    const std::lock_guard lock(mutex_);
    if (!generation_->latch->failed()) {
      throw std::invalid_argument(
          "generation: expected a failed one before the next, got a live one");
    }
    next = make_generation(generation_->number + 1, members, epoch_);
    generation_ = next;
    outlives_ = false;
    end = ended_.has_value() ? ended_ : loss_;
  }
  if (end.has_value()) {
    next->latch->fail(*end);
  }
}

void RunState::set_epoch(int64_t epoch) {
  const std::lock_guard lock(mutex_);
  epoch_ = epoch;
  generation_->latch->set_epoch(epoch);
}

void RunState::fail(Failure failure) {
  std::shared_ptr<const Generation> current;
  {
    const std::lock_guard lock(mutex_);
    if (failure.rank == rank_ && !ended_.has_value()) {
      ended_ = failure;
    }
    current = generation_;
  }
  current->latch->fail(std::move(failure));
}

std::optional<Failure> RunState::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void RunState::lose_store(Failure loss) {
  std::shared_ptr<const Generation> current;
  bool outlives = false;
  {
    const std::lock_guard lock(mutex_);
    if (!loss_.has_value()) {
      loss_ = loss;
    }
    outlives = outlives_;
    current = generation_;
  }
  if (outlives) {
    current->latch->confirm_directly();
  } else {
    current->latch->fail(std::move(loss));
  }
}

std::optional<Failure> RunState::store_loss() const {
  const std::lock_guard lock(mutex_);
  return loss_;
}

void RunState::outlive_store(bool outlives) {
  std::shared_ptr<const Generation> current;
  std::optional<Failure> loss;
  {
    const std::lock_guard lock(mutex_);
    outlives_ = outlives && survives_;
    if (!outlives_) {
      loss = loss_;
    }
    current = generation_;
  }
  if (loss.has_value()) {
    current->latch->fail(std::move(*loss));
  }
}

}  // namespace pipetransformer::autodp
