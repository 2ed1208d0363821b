// When each cell ran, for whoever asked: a ring for the whole process.
// Torch-free. Off, a cell costs one look at a flag.
//
// Thread safety: every function may be called from any thread at any time.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/schedule/schedule.h"

namespace pipetransformer::pipe {

// The kind of a piece of spare work (WorkerPool::add_spare); those of cells are
// the letters of planner::OpKind.
constexpr char kSparePiece = 'P';

struct CellSpan {
  char kind = static_cast<char>(planner::OpKind::kForward);
  int32_t stage = 0;
  int32_t microbatch = 0;
  // Of the monotonic clock. On accelerators the host's time, for the launches.
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// Notes from now on the last so many cells of all pipelines; 0: no more. What
// was noted and not taken is dropped.
void trace_cells(int64_t most);

// What was noted since, in the order in which cells ended, and how many earlier
// cells there was no room for.
std::pair<std::vector<CellSpan>, int64_t> take_cells();

// Notes a cell from its making to its end, if cells are noted.
class CellTimer {
 public:
  CellTimer(planner::OpKind kind, int32_t stage, int32_t microbatch) noexcept
      : CellTimer(static_cast<char>(kind), stage, microbatch) {}
  // Of spare work: a letter, the worker and the item.
  CellTimer(char kind, int32_t stage, int32_t microbatch) noexcept;
  ~CellTimer();
  CellTimer(const CellTimer&) = delete;
  CellTimer& operator=(const CellTimer&) = delete;

 private:
  CellSpan span_;
  const bool on_;
};

}  // namespace pipetransformer::pipe
