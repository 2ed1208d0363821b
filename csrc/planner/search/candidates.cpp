#include "planner/search/candidates.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <tuple>
#include <utility>

#include "planner/costs/all_reduce.h"
#include "planner/costs/estimate.h"
#include "planner/solvers/best_cuts.h"

namespace pipetransformer::planner {

namespace {

using TieBreak = std::tuple<
    int64_t,
    const Cuts&,
    int64_t,
    int64_t,
    ScheduleKind,
    PrefixPlacement,
    CacheTier>;

TieBreak tie_break(const Candidate& candidate) {
  const Choice& choice = candidate.choice;
  return TieBreak(
      choice.shape.num_stages,  // a longer pipeline must win something
      choice.cuts,
      -choice.shape.num_replicas,  // so must idle devices
      choice.shape.num_microbatches,
      choice.schedule,
      choice.prefix,
      choice.cache);
}

Cuts shifted(Cuts cuts, int64_t by) {
  for (int64_t& cut : cuts) {
    cut += by;
  }
  return cuts;
}

bool fits(const Rules& rules, const StepModel& model, const Cuts& cuts) {
  const int64_t cap = rules.stage_limits.front().cap;  // that of all of them
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    const auto stage = static_cast<int64_t>(k);
    if (model.memory().stage(stage, cuts[k], cuts[k + 1]) -
            model.memory().fixed >
        cap) {
      return false;
    }
  }
  return true;
}

// What of a stage's all-reduce no backward hides; see Note [Slack of an
// all-reduce] in estimate.cpp, of which this takes the part that depends on the
// stage alone.
StageFunction exposed_all_reduce(
    const StepModel& model,
    const Cluster& cluster,
    const Variant& variant) {
  if (variant.shape.num_replicas == 1) {
    return {};
  }
  const bool hides = variant.schedule == ScheduleKind::kGPipe;
  return [&model, &cluster, shape = variant.shape, hides](
             int64_t begin, int64_t end) {
    const int64_t bytes = model.gradient_bytes().layers(begin, end);
    const int64_t slack = hides ? model.backward().layers(0, begin) : 0;
    return std::max<int64_t>(0, all_reduce_ns(bytes, cluster, shape) - slack);
  };
}

// What of a step no cuts change.
int64_t uncut_ns(const StepModel& model, const Shape& shape) {
  const int64_t n = model.layers().num_layers();
  return model.forward().layers(0, n) + model.backward().layers(0, n) +
         model.prefix().cache_wait_ns +
         prefix_phase_ns(
             model.prefix().placement,
             model.prefix().per_microbatch_ns,
             shape.num_stages,
             shape.num_microbatches);
}

// The best cuts by the schedule's estimate; for 1F1B and ZB-H1, whose estimate
// is neither exact nor a bound, GPipe's too. GPipe's are left out when their
// estimate exceeds `cutoff_ns`.
std::vector<Cuts> cuts_to_score(
    const StepModel& model,
    const Cluster& cluster,
    const Variant& variant,
    const Rules& rules,
    int64_t cutoff_ns) {
  const bool gpipe = variant.schedule == ScheduleKind::kGPipe;
  CutObjective in_turn{model.both()};
  in_turn.repeats = variant.shape.num_microbatches - 1;
  in_turn.cut_ns = model.cut_ns();
  in_turn.exposed_ns = exposed_all_reduce(model, cluster, variant);
  in_turn.accumulation_steps = model.workload().accumulation_steps;
  CutObjective apart = in_turn;
  apart.forward = model.forward();
  apart.backward = &model.backward();
  int64_t cutoff = std::numeric_limits<int64_t>::max();
  if (gpipe) {
    apart.hiding_cut_ns = model.backward_cut_ns();
    if (cutoff_ns < cutoff) {
      cutoff = cutoff_ns - uncut_ns(model, variant.shape);
    }
  }
  std::vector<Cuts> all;
  if (auto best = best_cuts(apart, rules, variant.shape.num_stages, cutoff)) {
    all.push_back(std::move(best->cuts));
  }
  if (!gpipe) {
    if (auto best = best_cuts(in_turn, rules, variant.shape.num_stages)) {
      all.push_back(std::move(best->cuts));
    }
  }
  return all;
}

Candidate make_candidate(
    const StepModel& model,
    const Variant& variant,
    const Cuts& cuts,
    int64_t boundary) {
  const StepCosts costs = model.step(cuts);
  Candidate candidate;
  candidate.choice = {
      variant.shape,
      variant.schedule,
      model.prefix().placement,
      variant.cache,
      shifted(cuts, boundary)};
  candidate.estimate_ns = estimate_ns(costs);
  candidate.lower_bound_ns = lower_bound_ns(costs);
  candidate.estimate_ns =
      std::max(candidate.estimate_ns, candidate.lower_bound_ns);
  for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
    candidate.bytes_per_stage.push_back(
        model.memory().stage(static_cast<int64_t>(k), cuts[k], cuts[k + 1]));
  }
  return candidate;
}

// C(n - 1, K - 1), or limit + 1 if it is more than `limit`.
int64_t count_cuts(int64_t num_layers, int64_t num_stages, int64_t limit) {
  const int64_t chosen = std::min(num_stages - 1, num_layers - num_stages);
  int64_t count = 1;
  for (int64_t k = 1; k <= chosen && count <= limit; ++k) {
    count = count * (num_layers - k) / k;
  }
  return std::min(count, limit + 1);
}

// Calls `visit` for all cuts in lexicographic order.
void enumerate(
    const std::vector<char>& allowed,
    int64_t num_stages,
    const std::function<void(const Cuts&)>& visit) {
  const auto n = static_cast<int64_t>(allowed.size()) - 1;
  Cuts cuts{0};
  const std::function<void()> extend = [&] {
    const auto left = num_stages - static_cast<int64_t>(cuts.size());
    if (left == 0) {
      cuts.push_back(n);
      visit(cuts);
      cuts.pop_back();
      return;
    }
    for (int64_t j = cuts.back() + 1; j <= n - left; ++j) {
      if (allowed[static_cast<std::size_t>(j)] != 0) {
        cuts.push_back(j);
        extend();
        cuts.pop_back();
      }
    }
  };
  extend();
}

// Context and frozen layers alone exceed the device.
bool has_no_room(const Rules& rules) {
  return rules.stage_limits.front().cap < 0;
}

}  // namespace

bool estimated_better(const Candidate& a, const Candidate& b) {
  return a.estimate_ns != b.estimate_ns ? a.estimate_ns < b.estimate_ns
                                        : tie_break(a) < tie_break(b);
}

bool simulated_better(const Candidate& a, const Candidate& b) {
  return a.simulated_ns != b.simulated_ns ? a.simulated_ns < b.simulated_ns
                                          : tie_break(a) < tie_break(b);
}

StepModel model_of(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Variant& variant) {
  return StepModel(
      profile,
      cluster,
      request.workload,
      variant.shape,
      variant.schedule,
      variant.prefix,
      variant.cache);
}

Rules rules_of(
    const StepModel& model,
    const Profile& profile,
    const Cluster& cluster,
    int64_t boundary) {
  const StageMemory& memory = model.memory();
  Rules rules{allowed_cuts(profile, boundary, profile.num_layers()), {}, {}};
  for (const MemoryPoint& point : memory.points) {
    rules.stage_limits.push_back(
        {{point.base, memory.per_microbatch, point.counts},
         cluster.device_memory_bytes - memory.fixed});
  }
  return rules;
}

std::vector<Candidate> candidates_of(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Variant& variant,
    std::size_t most,
    int64_t cutoff_ns) {
  const int64_t boundary = request.workload.boundary;
  const StepModel model = model_of(profile, cluster, request, variant);
  const Rules rules = rules_of(model, profile, cluster, boundary);
  std::vector<Candidate> found;
  if (has_no_room(rules)) {
    return found;
  }
  const std::vector<Cuts> all =
      request.cuts ? std::vector<Cuts>{shifted(*request.cuts, -boundary)}
                   : cuts_to_score(model, cluster, variant, rules, cutoff_ns);
  for (const Cuts& cuts : all) {
    if (fits(rules, model, cuts)) {
      found.push_back(make_candidate(model, variant, cuts, boundary));
    }
  }
  std::sort(found.begin(), found.end(), estimated_better);
  found.erase(
      std::unique(
          found.begin(),
          found.end(),
          [](const Candidate& a, const Candidate& b) {
            return a.choice.cuts == b.choice.cuts;
          }),
      found.end());
  found.resize(std::min(found.size(), most));
  return found;
}

bool fits_somehow(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Variant& variant) {
  const int64_t boundary = request.workload.boundary;
  const StepModel model = model_of(profile, cluster, request, variant);
  const Rules rules = rules_of(model, profile, cluster, boundary);
  if (has_no_room(rules)) {
    return false;
  }
  if (request.cuts) {
    return fits(rules, model, shifted(*request.cuts, -boundary));
  }
  return cuts_within(rules, variant.shape.num_stages).has_value();
}

bool for_each_candidate(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Variant& variant,
    int64_t limit,
    const std::function<void(Candidate&&)>& visit) {
  const int64_t boundary = request.workload.boundary;
  const int64_t num_active = profile.num_layers() - boundary;
  const int64_t num_stages = variant.shape.num_stages;
  if (request.cuts || count_cuts(num_active, num_stages, limit) > limit) {
    return request.cuts.has_value();
  }
  const StepModel model = model_of(profile, cluster, request, variant);
  const Rules rules = rules_of(model, profile, cluster, boundary);
  if (!has_no_room(rules)) {
    enumerate(rules.cut_allowed, num_stages, [&](const Cuts& cuts) {
      if (fits(rules, model, cuts)) {
        visit(make_candidate(model, variant, cuts, boundary));
      }
    });
  }
  return true;
}

StepCosts costs_of(
    const Profile& profile,
    const Cluster& cluster,
    const Request& request,
    const Candidate& candidate) {
  return step_costs(profile, cluster, request.workload, candidate.choice);
}

}  // namespace pipetransformer::planner
