// The planner's exact solvers alone, on plain lists: for tests, benchmarks and
// tools. The lists are checked in Python.
#include <deque>
#include <tuple>
#include <utility>

#include <pybind11/stl.h>

#include "planner/solvers/best_cuts.h"
#include "planner/solvers/cheapest_cuts.h"
#include "planner/solvers/partition.h"
#include "planner/solvers/staircase.h"
#include "python/bindings.h"

namespace pipetransformer::bindings {

namespace py = pybind11;
using namespace pipetransformer::planner;

namespace {

using Columns = std::vector<int64_t>;
// layers, entry, exit, overlapped
using CostRow = std::tuple<Columns, Columns, Columns, bool>;
// layers, cap
using LimitRow = std::pair<Columns, int64_t>;
// fixed, repeated, counts, cap
using StageLimitRow = std::tuple<Columns, Columns, Columns, int64_t>;
// cut_allowed, limits, limits by position
using RuleRows = std::
    tuple<std::vector<bool>, std::vector<LimitRow>, std::vector<StageLimitRow>>;

SpanCost span_cost(const CostRow& row) {
  const auto& [layers, entry, exit, overlapped] = row;
  return SpanCost(
      layers, entry, exit, overlapped ? Charges::kOverlapped : Charges::kAdded);
}

// Rules and the costs they refer to.
class OwnedRules {
 public:
  explicit OwnedRules(const RuleRows& rows) {
    const auto& [allowed, limits, stage_limits] = rows;
    rules.cut_allowed.assign(allowed.begin(), allowed.end());
    for (const auto& [layers, cap] : limits) {
      rules.limits.push_back({costs_.emplace_back(layers), cap});
    }
    for (const auto& [fixed, repeated, counts, cap] : stage_limits) {
      const SpanCost& first = costs_.emplace_back(fixed);
      const SpanCost& second = costs_.emplace_back(repeated);
      rules.stage_limits.push_back({{first, second, counts}, cap});
    }
  }

  Rules rules;

 private:
  std::deque<SpanCost> costs_;  // keeps its elements in place
};

std::optional<std::pair<int64_t, Cuts>>
least_largest(const CostRow& costs, const RuleRows& rules, int64_t num_stages) {
  const auto found =
      min_max(span_cost(costs), OwnedRules(rules).rules, num_stages);
  return found ? std::optional(std::pair(found->value, found->cuts))
               : std::nullopt;
}

// The last limit by position is the cost; its cap is not.
std::optional<std::pair<int64_t, Cuts>>
least_largest_by_position(const RuleRows& rules, int64_t num_stages) {
  OwnedRules owned(rules);
  const StageCost cost = owned.rules.stage_limits.back().cost;
  owned.rules.stage_limits.pop_back();
  const auto found = min_max(cost, owned.rules, num_stages);
  return found ? std::optional(std::pair(found->value, found->cuts))
               : std::nullopt;
}

std::vector<std::tuple<int64_t, int64_t, Cuts>> stairs(
    const CostRow& forward,
    const CostRow& backward,
    const RuleRows& rules,
    int64_t num_stages) {
  std::vector<std::tuple<int64_t, int64_t, Cuts>> points;
  for (StaircasePoint& point : staircase(
           span_cost(forward),
           span_cost(backward),
           OwnedRules(rules).rules,
           num_stages)) {
    points.emplace_back(
        point.forward_ns, point.backward_ns, std::move(point.cuts));
  }
  return points;
}

std::optional<std::pair<int64_t, Cuts>>
cheapest(const Columns& cut_costs, const RuleRows& rules, int64_t num_stages) {
  const auto found =
      cheapest_cuts(cut_costs, OwnedRules(rules).rules, num_stages);
  return found ? std::optional(std::pair(found->total, found->cuts))
               : std::nullopt;
}

// What is exposed: max(0, reduced[end] - reduced[begin] - slack[begin]).
std::optional<std::tuple<int64_t, Cuts, bool>> best(
    const CostRow& forward,
    const std::optional<CostRow>& backward,
    int64_t repeats,
    const Columns& cut_costs,
    const Columns& hiding_cut_costs,
    const std::optional<std::pair<Columns, Columns>>& exposure,
    int64_t accumulation_steps,
    const RuleRows& rules,
    int64_t num_stages,
    std::optional<int64_t> cutoff) {
  const SpanCost forward_cost = span_cost(forward);
  std::optional<SpanCost> backward_cost;
  CutObjective objective{forward_cost};
  if (backward) {
    objective.backward = &backward_cost.emplace(span_cost(*backward));
  }
  objective.repeats = repeats;
  objective.cut_ns = cut_costs;
  objective.hiding_cut_ns = hiding_cut_costs;
  objective.accumulation_steps = accumulation_steps;
  if (exposure) {
    objective.exposed_ns = [reduced = SpanCost(exposure->first),
                            slack = exposure->second](
                               int64_t begin, int64_t end) {
      return std::max<int64_t>(
          0,
          reduced.layers(begin, end) - slack[static_cast<std::size_t>(begin)]);
    };
  }
  const auto found = best_cuts(
      objective,
      OwnedRules(rules).rules,
      num_stages,
      cutoff.value_or(std::numeric_limits<int64_t>::max()));
  if (!found) {
    return std::nullopt;
  }
  return std::tuple(found->value, found->cuts, found->exact);
}

}  // namespace

void bind_planner_solvers(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def(
      "min_max",
      &least_largest,
      py::arg("costs"),
      py::arg("rules"),
      py::arg("num_stages"),
      no_gil);
  m.def(
      "min_max_by_position",
      &least_largest_by_position,
      py::arg("rules"),
      py::arg("num_stages"),
      no_gil);
  m.def(
      "staircase",
      &stairs,
      py::arg("forward"),
      py::arg("backward"),
      py::arg("rules"),
      py::arg("num_stages"),
      no_gil);
  m.def(
      "cheapest_cuts",
      &cheapest,
      py::arg("cut_costs"),
      py::arg("rules"),
      py::arg("num_stages"),
      no_gil);
  m.def(
      "best_cuts",
      &best,
      py::arg("forward"),
      py::arg("backward"),
      py::arg("repeats"),
      py::arg("cut_costs"),
      py::arg("hiding_cut_costs"),
      py::arg("exposure"),
      py::arg("accumulation_steps"),
      py::arg("rules"),
      py::arg("num_stages"),
      py::arg("cutoff"),
      no_gil);
}

}  // namespace pipetransformer::bindings
