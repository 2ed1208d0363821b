#include "planner/search/search.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <set>
#include <utility>

#include "planner/search/shapes.h"

namespace pipetransformer::planner {

namespace {

constexpr std::size_t kMostCandidates = 8;
// Estimates of plans that share cores are nearly alike, see Note [Shared
// cores].
constexpr std::size_t kMostSharing = 32;
constexpr std::size_t kMostPerVariant = 3;
constexpr int64_t kNoCutoff = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostCuts = 4096;           // of a variant that is enumerated
constexpr std::size_t kMostSimulated = 4096;  // beyond the best by estimate

class PlanSearch {
 public:
  PlanSearch(
      const Profile& profile,
      const Cluster& cluster,
      const Request& request,
      const Simulate& simulate)
      : profile_(profile),
        cluster_(cluster),
        request_(request),
        simulate_(simulate),
        variants_(variants(profile, cluster, request)) {}

  SearchResult run() {
    SearchResult result;
    rank_by_estimate();
    for (Candidate& candidate : best_) {
      simulate(candidate);
    }
    std::sort(best_.begin(), best_.end(), simulated_better);
    best_.resize(std::min(best_.size(), kMostCandidates));
    result.exhaustive =
        !best_.empty() && !shares_cores() && improve_by_enumeration();
    result.candidates = std::move(best_);
    return result;
  }

  // One for each K that has no plan, of those that are tried.
  std::vector<Refusal> refusals() const {
    std::vector<Refusal> all;
    for (const int64_t num_stages :
         stage_counts(request_, profile_, cluster_)) {
      if (is_feasible(num_stages)) {
        continue;
      }
      if (auto refusal = refusal_of(profile_, cluster_, request_, num_stages)) {
        all.push_back(*refusal);
      }
    }
    return all;
  }

  bool is_feasible(int64_t num_stages) const {
    return feasible_.count(num_stages) > 0;
  }

 private:
  // Variants come by rising bound: once no bound is below the estimate of the
  // last of the best, none that follows can enter.
  void rank_by_estimate() {
    for (const Variant& variant : variants_) {
      if (best_.size() == most_ranked() &&
          variant.bound_ns > best_.back().estimate_ns) {
        break;
      }
      std::vector<Candidate> found =
          candidates_of(profile_, cluster_, request_, variant, kMostPerVariant);
      if (!found.empty()) {
        feasible_.insert(variant.shape.num_stages);
      }
      for (Candidate& candidate : found) {
        if (!placed_no_worse(candidate)) {
          best_.push_back(std::move(candidate));
        }
      }
      std::sort(best_.begin(), best_.end(), estimated_better);
      best_.resize(std::min(best_.size(), most_ranked()));
    }
  }

  // Note [Shared cores]
  // Where devices share too few cores, a step takes all their work over the
  // cores, however it is cut, and what is left to tell plans apart is when
  // fewer work than there are cores. Of such plans more are simulated; their
  // cuts are those that are best for devices of their own: others are no
  // faster by more than the ends of a step, and lose where more cores are free.
  bool shares_cores() const {
    return cluster_.cores_permille > 0;
  }

  std::size_t most_ranked() const {
    return shares_cores() ? kMostSharing : kMostCandidates;
  }

  // Whether the same is there with the prefix placed otherwise, and no slower:
  // cached, it takes no time wherever it is. How much of a prefix fits into
  // gaps the simulator alone can tell.
  bool placed_no_worse(const Candidate& candidate) const {
    return std::any_of(best_.begin(), best_.end(), [&](const Candidate& other) {
      return same_but_for_placement(other, candidate) &&
             other.estimate_ns <= candidate.estimate_ns;
    });
  }

  static bool same_but_for_placement(const Candidate& a, const Candidate& b) {
    const bool fills = a.choice.prefix == PrefixPlacement::kFilled;
    return fills == (b.choice.prefix == PrefixPlacement::kFilled) &&
           a.choice.shape == b.choice.shape &&
           a.choice.schedule == b.choice.schedule &&
           a.choice.cache == b.choice.cache && a.choice.cuts == b.choice.cuts;
  }

  // Note [Simulating what the estimate may have missed]
  // The estimate of 1F1B and ZB-H1 is neither a bound nor exact. Where a
  // variant has few cuts, all are bounded, and those whose bound is below the
  // best simulated time are simulated, lowest bound first: then nothing better
  // can be left. Everything is counted, nothing timed, so ranks agree. Returns
  // whether that covered every variant.
  bool improve_by_enumeration() {
    std::vector<Candidate> open;
    bool all = true;
    for (const Variant& variant : variants_) {
      const int64_t best_ns = best_.front().simulated_ns;
      if (variant.bound_ns >= best_ns) {
        break;
      }
      all &= for_each_candidate(
          profile_,
          cluster_,
          request_,
          variant,
          kMostCuts,
          [&](Candidate&& candidate) {
            if (candidate.lower_bound_ns < best_ns) {
              open.push_back(std::move(candidate));
            }
          });
    }
    std::sort(
        open.begin(), open.end(), [](const Candidate& a, const Candidate& b) {
          return a.lower_bound_ns != b.lower_bound_ns
                     ? a.lower_bound_ns < b.lower_bound_ns
                     : estimated_better(a, b);
        });
    for (std::size_t i = 0; i < open.size(); ++i) {
      if (open[i].lower_bound_ns >= best_.front().simulated_ns) {
        return all;
      }
      if (i == kMostSimulated) {
        return false;
      }
      simulate(open[i]);
      insert(std::move(open[i]));
    }
    return all;
  }

  void insert(Candidate candidate) {
    const bool known =
        std::any_of(best_.begin(), best_.end(), [&](const Candidate& other) {
          return same_but_for_placement(other, candidate) &&
                 other.simulated_ns <= candidate.simulated_ns;
        });
    if (known) {
      return;
    }
    best_.push_back(std::move(candidate));
    std::sort(best_.begin(), best_.end(), simulated_better);
    best_.resize(std::min(best_.size(), kMostCandidates));
  }

  void simulate(Candidate& candidate) const {
    const Simulated simulated =
        simulate_(costs_of(profile_, cluster_, request_, candidate));
    candidate.simulated_ns = simulated.step_ns;
    candidate.bubble_fraction = simulated.bubble_fraction;
  }

  const Profile& profile_;
  const Cluster& cluster_;
  const Request& request_;
  const Simulate& simulate_;
  const std::vector<Variant> variants_;
  std::vector<Candidate> best_;
  std::set<int64_t> feasible_;
};

}  // namespace

SearchResult search(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Simulate& simulate) {
  check(profile, cluster, request.workload.global_batch);
  check(request, profile, cluster);
  PlanSearch usual(profile, cluster, request, simulate);
  SearchResult result = usual.run();
  result.refusals = usual.refusals();
  if (!result.candidates.empty() || request.num_microbatches) {
    return result;
  }
  Request smaller = request;
  smaller.finer_microbatches = true;
  PlanSearch finer(profile, cluster, smaller, simulate);
  SearchResult found = finer.run();
  // None for a K that fits, and is not among the candidates.
  const std::vector<Refusal> others = finer.refusals();
  for (const Refusal& refusal : result.refusals) {
    const auto other =
        std::find_if(others.begin(), others.end(), [&](const Refusal& each) {
          return each.shape.num_stages == refusal.shape.num_stages;
        });
    if (other == others.end()) {
      continue;
    }
    const bool closer = other->missing_bytes > 0 &&
                        other->missing_bytes < refusal.missing_bytes;
    found.refusals.push_back(closer ? *other : refusal);
  }
  return found;
}

}  // namespace pipetransformer::planner
