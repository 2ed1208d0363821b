#include "autodp/store/store_board.h"

#include <algorithm>
#include <thread>

namespace pipetransformer::autodp {

namespace {

// How long to sleep before another look at the board: news within a change of
// plan come quickly, a plan to a waiting rank rarely.
constexpr std::chrono::microseconds kFirstBoardPause{500};
constexpr std::chrono::microseconds kLongestBoardPause{20000};

}  // namespace

std::optional<std::string> StoreBoard::read(const std::string& key) {
  return client_.read(prefix_ + key);
}

bool StoreBoard::exist(const std::vector<std::string>& keys) {
  return client_.wait_any({with_prefix(keys)}, std::chrono::milliseconds(0)) ==
         0;
}

void StoreBoard::set(const std::string& key, const std::string& value) {
  client_.set(prefix_ + key, value);
}

std::string StoreBoard::compare_set(
    const std::string& key,
    const std::string& expected,
    const std::string& desired) {
  return client_.compare_set(prefix_ + key, expected, desired);
}

void StoreBoard::remove(const std::vector<std::string>& keys) {
  client_.remove(with_prefix(keys));
}

std::vector<std::string>
StoreBoard::with_prefix(const std::vector<std::string>& keys) const {
  std::vector<std::string> all;
  for (const auto& key : keys) {
    all.push_back(prefix_ + key);
  }
  return all;
}

bool drive(
    Transition& transition,
    Board& board,
    std::chrono::milliseconds slice) {
  const auto end = std::chrono::steady_clock::now() + slice;
  auto pause = kFirstBoardPause;
  while (true) {
    const auto progress = transition.step(board, steady_now_s());
    if (progress == Progress::kDone) {
      return true;
    }
    if (progress == Progress::kMoved) {
      continue;
    }
    if (std::chrono::steady_clock::now() + pause > end) {
      return false;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestBoardPause);
  }
}

}  // namespace pipetransformer::autodp
