// The best cuts of one variant: solved, enumerated, or those the caller forces.
// Pure, thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "planner/costs/step_model.h"
#include "planner/input/layer_profile.h"
#include "planner/search/request.h"
#include "planner/search/variants.h"

namespace pipetransformer::planner {

struct Candidate {
  Choice choice;
  int64_t estimate_ns = 0;
  int64_t lower_bound_ns = 0;
  int64_t simulated_ns = 0;  // this and the bubble: 0 until simulated
  double bubble_fraction = 0;
  std::vector<int64_t> bytes_per_stage;
};

// Shorter first; equal ones by cuts, M, schedule, placement, tier.
bool estimated_better(const Candidate& a, const Candidate& b);
bool simulated_better(const Candidate& a, const Candidate& b);

// Refers to profile, cluster and request.
StepModel model_of(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Variant& variant);

// What limits the stages of a model: cuts and memory. Refers to the model.
Rules rules_of(
    const StepModel& model,
    const Profile& profile,
    const Cluster& cluster,
    int64_t boundary);

// Candidates of a variant, best estimate first, at most `most`; empty when no
// cuts fit. Those whose estimate exceeds `cutoff_ns` may be missing.
std::vector<Candidate> candidates_of(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Variant& variant,
    std::size_t most,
    int64_t cutoff_ns = std::numeric_limits<int64_t>::max());

// Whether some cuts of the variant fit.
bool fits_somehow(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Variant& variant);

// All cuts of a variant, as long as they are at most `limit`: calls `visit` for
// each that fits. False: there are more, none was visited. Forced cuts are the
// only ones.
bool for_each_candidate(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Variant& variant,
    int64_t limit,
    const std::function<void(Candidate&&)>& visit);

StepCosts costs_of(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Candidate& candidate);

}  // namespace pipetransformer::planner
