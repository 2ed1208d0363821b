// The rules of the rendezvous: which ranks form the next generation, given what
// one rank has seen. Torch-free and pure: no store, no clock, so that every
// interleaving can be enumerated in a test.
//
// Each survivor of a failed generation answers once, with its standing or that
// it leaves. The rendezvous is closed by one store key that is written once
// (compare_set), and holds the list: several ranks may propose lists, exactly
// one wins, and all read it. A rank that is not in it is fenced.
#pragma once

#include <optional>
#include <set>
#include <vector>

namespace pipetransformer::autodp {

class Rendezvous {
 public:
  // `members`: those of the failed generation, `rank` among them. Throws
  // std::invalid_argument otherwise.
  Rendezvous(int rank, const std::vector<int>& members);

  // A member's answer was read, or the own one was written; the first answer
  // of a rank counts. Ranks that are no members are ignored.
  void on_answer(int rank, bool stays);
  // A member is known or believed to be dead: nobody waits for it. It still
  // belongs to the list if its answer comes before the rendezvous is closed.
  void on_gone(int rank);
  void on_deadline() {
    deadline_passed_ = true;
  }
  // The list was read, or the own proposal won or lost against it. The first
  // one stays: a later, different one is our bug and throws std::logic_error.
  void on_closed(const std::vector<int>& list);

  // The list to try to write now, ascending; nullopt: wait. Never before the
  // own answer, and never once the list is known.
  std::optional<std::vector<int>> proposal() const;

  // Members whose answer was not seen yet, gone or not.
  std::vector<int> silent() const;
  const std::optional<std::vector<int>>& closed() const {
    return closed_;
  }
  // Whether the list is known and this rank is not in it.
  bool fenced() const;

 private:
  int rank_;
  std::set<int> silent_;
  std::set<int> staying_;
  std::set<int> gone_;
  bool deadline_passed_ = false;
  std::optional<std::vector<int>> closed_;
};

}  // namespace pipetransformer::autodp
