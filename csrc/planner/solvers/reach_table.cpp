// The table of Note [Moving caps].
#include <algorithm>

#include "planner/solvers/reach.h"

namespace pipetransformer::planner {

namespace {

constexpr int64_t kNone = -1;

}  // namespace

Reach::Probe Reach::probe_table(const Test& watched) {
  next_cap_ = kNoCap;
  if (!fill(&watched)) {
    return {false, next_cap_};
  }
  const Cuts cuts = spelled();
  int64_t largest = 0;
  for (int64_t k = 0; k < num_stages_; ++k) {
    const auto index = static_cast<std::size_t>(k);
    largest =
        std::max(largest, whole_of(watched, k, cuts[index], cuts[index + 1]));
  }
  return {true, largest};
}

std::optional<Cuts> Reach::first_cuts() {
  if (!tabulate()) {
    return std::nullopt;
  }
  return spelled();
}

bool Reach::tabulate() {
  return num_stages_ >= 1 && num_stages_ <= most_stages_ && fill(nullptr);
}

Cuts Reach::spelled() const {
  Cuts cuts{0};
  for (int64_t k = 0; k < num_stages_; ++k) {
    cuts.push_back(next_end(k, cuts.back()));
  }
  return cuts;
}

int64_t Reach::next_end(int64_t index, int64_t begin) const {
  const Level& level = levels_[static_cast<std::size_t>(index)];
  const auto place = static_cast<std::size_t>(level.top - begin);
  return begin > level.top || place >= level.count
             ? kNone
             : next_ends_[level.offset + place];
}

int64_t Reach::lowest_begin(int64_t index) const {
  return levels_[static_cast<std::size_t>(index)].lowest;
}

int64_t Reach::highest_begin(int64_t index) const {
  return levels_[static_cast<std::size_t>(index)].top;
}

bool Reach::has_rest(int64_t index, int64_t begin) const {
  return next_end(index, begin) != kNone;
}

bool Reach::fill(const Test* watched) {
  if (!may_cut(0) || !may_cut(num_layers_)) {
    note_charges(watched, 0);
    note_charges(watched, num_layers_);
    return false;
  }
  if (!fill_tops(watched)) {
    return false;
  }
  next_ends_.assign(1, num_layers_);
  for (int64_t k = num_stages_ - 1; k >= 0; --k) {
    fill_level(k, watched);
    if (levels_[static_cast<std::size_t>(k)].lowest > num_layers_) {
      return false;
    }
  }
  return has_rest(0, 0);
}

// The highest begin of each stage, by layers alone.
bool Reach::fill_tops(const Test* watched) {
  levels_.assign(static_cast<std::size_t>(num_stages_) + 1, Level{});
  int64_t begin = 0;
  for (int64_t k = 0; k < num_stages_; ++k) {
    levels_[static_cast<std::size_t>(k)].top =
        std::min(begin, num_layers_ - (num_stages_ - k));
    const int64_t from = begin;
    begin =
        furthest(from, [&](int64_t end) { return may_reach(k, from, end); });
    if (watched != nullptr && begin < num_layers_) {
      note(watched, floor_of(*watched, k, from, begin + 1));
    }
  }
  levels_.back() = {num_layers_, num_layers_, 0, 1};
  return begin == num_layers_;
}

void Reach::fill_level(int64_t index, const Test* watched) {
  Level& level = levels_[static_cast<std::size_t>(index)];
  const Level& rest = levels_[static_cast<std::size_t>(index) + 1];
  level.offset = next_ends_.size();
  level.lowest = num_layers_ + 1;
  for (int64_t begin = level.top; begin >= index; --begin) {
    if (begin < rest.lowest && !may_reach(index, begin, rest.lowest)) {
      if (watched != nullptr) {
        note(watched, floor_of(*watched, index, begin, rest.lowest));
      }
      break;
    }
    int64_t end = kNone;
    if (latest_cut_[static_cast<std::size_t>(begin)] != begin) {
      // Not allowed, whatever the caps.
    } else if (may_cut(begin)) {
      end = first_end(index, begin, rest, watched);
    } else {
      note_charges(watched, begin);
    }
    next_ends_.push_back(end);
    if (end != kNone) {
      level.lowest = begin;
    }
  }
  level.count = next_ends_.size() - level.offset;
}

int64_t Reach::first_end(
    int64_t index,
    int64_t begin,
    const Level& rest,
    const Test* watched) {
  for (int64_t end = std::max(begin + 1, rest.lowest); end <= rest.top; ++end) {
    if (!may_reach(index, begin, end)) {
      if (watched != nullptr) {
        note(watched, floor_of(*watched, index, begin, end));
      }
      return kNone;
    }
    if (next_end(index + 1, end) == kNone) {
      continue;
    }
    if (fits(index, begin, end)) {
      return end;
    }
    if (watched != nullptr) {
      note(watched, span_of(*watched, index, begin, end));
    }
  }
  return kNone;
}

}  // namespace pipetransformer::planner
