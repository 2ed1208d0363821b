#include "planner/solvers/cut_terms.h"

namespace pipetransformer::planner {

StageTerms
stage_terms(const CutObjective& objective, int64_t begin, int64_t end) {
  StageTerms terms;
  if (objective.repeats > 0) {
    terms.forward = objective.forward.get().stage(begin, end);
    if (objective.backward != nullptr) {
      terms.backward = objective.backward->stage(begin, end);
    }
  }
  if (objective.exposed_ns) {
    terms.exposed = objective.exposed_ns(begin, end);
  }
  const bool is_last = end == objective.forward.get().num_layers();
  if (!is_last && !objective.cut_ns.empty()) {
    terms.cut = objective.cut_ns[static_cast<std::size_t>(end)];
  }
  if (!is_last && !objective.hiding_cut_ns.empty()) {
    terms.hiding = objective.hiding_cut_ns[static_cast<std::size_t>(end)];
  }
  return terms;
}

}  // namespace pipetransformer::planner
