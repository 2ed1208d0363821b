// Planner: plain structs in, a struct out. JSON and sentences are Python's.
#include <pybind11/stl.h>

#include <stdexcept>

#include "planner/costs/prefix.h"
#include "planner/costs/step_costs.h"
#include "planner/costs/step_model.h"
#include "planner/input/layer_profile.h"
#include "planner/schedule/schedule.h"
#include "planner/search/paper.h"
#include "planner/search/request.h"
#include "planner/search/search.h"
#include "python/bindings.h"
#include "simulator/step.h"

namespace pipetransformer::bindings {

namespace py = pybind11;
using namespace pipetransformer::planner;

namespace {

void bind_inputs(py::module_& m) {
  py::class_<LayerProfile>(m, "Layer")
      .def(py::init<>())
      .def_readwrite("forward_ns", &LayerProfile::forward_ns)
      .def_readwrite("input_grad_ns", &LayerProfile::input_grad_ns)
      .def_readwrite("weight_grad_ns", &LayerProfile::weight_grad_ns)
      .def_readwrite("forward_only_ns", &LayerProfile::forward_only_ns)
      .def_readwrite("parameter_bytes", &LayerProfile::parameter_bytes)
      .def_readwrite("trainable_bytes", &LayerProfile::trainable_bytes)
      .def_readwrite(
          "activation_bytes_per_sample",
          &LayerProfile::activation_bytes_per_sample)
      .def_readwrite(
          "weight_grad_activation_bytes_per_sample",
          &LayerProfile::weight_grad_activation_bytes_per_sample)
      .def_readwrite(
          "activation_bytes_per_microbatch",
          &LayerProfile::activation_bytes_per_microbatch)
      .def_readwrite(
          "shared_activation_bytes", &LayerProfile::shared_activation_bytes)
      .def_readwrite(
          "boundary_bytes_per_sample", &LayerProfile::boundary_bytes_per_sample)
      .def_readwrite("trainable", &LayerProfile::trainable)
      .def_readwrite("optimizer_ns", &LayerProfile::optimizer_ns)
      .def_readwrite("optimizer_bytes", &LayerProfile::optimizer_bytes);
  py::class_<Profile>(m, "Profile")
      .def(py::init<>())
      .def_readwrite("microbatch_samples", &Profile::microbatch_samples)
      .def_readwrite("layers", &Profile::layers)
      .def_readwrite("tied_layers", &Profile::tied_layers)
      .def_readwrite("skips", &Profile::skips);
  py::class_<CacheTiers>(m, "CacheTiers")
      .def(py::init<>())
      .def_readwrite("host_bytes", &CacheTiers::host_bytes)
      .def_readwrite("host_bytes_per_s", &CacheTiers::host_bytes_per_s)
      .def_readwrite("disk_bytes", &CacheTiers::disk_bytes)
      .def_readwrite("disk_bytes_per_s", &CacheTiers::disk_bytes_per_s)
      .def_readwrite("host_record_ns", &CacheTiers::host_record_ns)
      .def_readwrite("host_in_line", &CacheTiers::host_in_line);
  py::class_<Cluster>(m, "Cluster")
      .def(py::init<>())
      .def_readwrite("num_nodes", &Cluster::num_nodes)
      .def_readwrite("devices_per_node", &Cluster::devices_per_node)
      .def_readwrite("device_memory_bytes", &Cluster::device_memory_bytes)
      .def_readwrite(
          "device_link_bytes_per_s", &Cluster::device_link_bytes_per_s)
      .def_readwrite("device_link_latency_ns", &Cluster::device_link_latency_ns)
      .def_readwrite("network_bytes_per_s", &Cluster::network_bytes_per_s)
      .def_readwrite("network_latency_ns", &Cluster::network_latency_ns)
      .def_readwrite(
          "optimizer_bytes_per_parameter_byte",
          &Cluster::optimizer_bytes_per_parameter_byte)
      .def_readwrite("context_bytes", &Cluster::context_bytes)
      .def_readwrite("cores_permille", &Cluster::cores_permille)
      .def_readwrite(
          "replica_link_bytes_per_s", &Cluster::replica_link_bytes_per_s)
      .def_readwrite(
          "replica_link_latency_ns", &Cluster::replica_link_latency_ns)
      .def_readwrite("step_ns", &Cluster::step_ns)
      .def_readwrite("row_ns", &Cluster::row_ns)
      .def_readwrite("cache", &Cluster::cache);
}

void bind_request(py::module_& m) {
  py::enum_<Checkpoint>(m, "Checkpoint")
      .value("NEVER", Checkpoint::kNever)
      .value("EXCEPT_LAST", Checkpoint::kExceptLast)
      .value("ALWAYS", Checkpoint::kAlways);
  py::enum_<CopyModel>(m, "CopyModel")
      .value("OVERLAPPED", CopyModel::kOverlapped)
      .value("SERIAL", CopyModel::kSerial);
  py::enum_<CacheTier>(m, "CacheTier")
      .value("NONE", CacheTier::kNone)
      .value("DEVICE", CacheTier::kDevice)
      .value("HOST", CacheTier::kHost)
      .value("DISK", CacheTier::kDisk);
  py::class_<Shape>(m, "Shape")
      .def(
          py::init<int64_t, int64_t, int64_t>(),
          py::arg("num_stages"),
          py::arg("num_replicas"),
          py::arg("num_microbatches"))
      .def_readonly("num_stages", &Shape::num_stages)
      .def_readonly("num_replicas", &Shape::num_replicas)
      .def_readonly("num_microbatches", &Shape::num_microbatches);
  py::class_<Workload>(m, "Workload")
      .def(py::init<>())
      .def_readwrite("global_batch", &Workload::global_batch)
      .def_readwrite("boundary", &Workload::boundary)
      .def_readwrite("checkpoint", &Workload::checkpoint)
      .def_readwrite("copies", &Workload::copies)
      .def_readwrite("num_samples", &Workload::num_samples)
      .def_readwrite("accumulation_steps", &Workload::accumulation_steps);
  py::class_<Choice>(m, "Choice")
      .def(
          py::init<
              Shape,
              ScheduleKind,
              PrefixPlacement,
              CacheTier,
              std::vector<int64_t>>(),
          py::arg("shape"),
          py::arg("schedule"),
          py::arg("prefix"),
          py::arg("cache"),
          py::arg("cuts"))
      .def_readonly("shape", &Choice::shape)
      .def_readonly("schedule", &Choice::schedule)
      .def_readonly("prefix", &Choice::prefix)
      .def_readonly("cache", &Choice::cache)
      .def_readonly("cuts", &Choice::cuts);
  py::class_<Request>(m, "Request")
      .def(py::init<>())
      .def_readwrite("workload", &Request::workload)
      .def_readwrite("num_stages", &Request::num_stages)
      .def_readwrite("max_replicas", &Request::max_replicas)
      .def_readwrite("min_replicas", &Request::min_replicas)
      .def_readwrite("all_replicas", &Request::all_replicas)
      .def_readwrite("num_microbatches", &Request::num_microbatches)
      .def_readwrite("cuts", &Request::cuts)
      .def_readwrite("min_microbatch_samples", &Request::min_microbatch_samples)
      .def_readwrite("schedules", &Request::schedules)
      .def_readwrite("prefix_placements", &Request::prefix_placements)
      .def_readwrite("cache_tiers", &Request::cache_tiers);
}

void bind_result(py::module_& m) {
  py::class_<Candidate>(m, "Candidate")
      .def_readonly("choice", &Candidate::choice)
      .def_readonly("estimate_ns", &Candidate::estimate_ns)
      .def_readonly("lower_bound_ns", &Candidate::lower_bound_ns)
      .def_readonly("simulated_ns", &Candidate::simulated_ns)
      .def_readonly("bubble_fraction", &Candidate::bubble_fraction)
      .def_readonly("bytes_per_stage", &Candidate::bytes_per_stage);
  py::enum_<RefusalCause>(m, "RefusalCause")
      .value("MEMORY", RefusalCause::kMemory)
      .value("FIXED_MEMORY", RefusalCause::kFixedMemory)
      .value("SHARED_PARAMETERS", RefusalCause::kSharedParameters)
      .value("BATCH", RefusalCause::kBatch);
  py::class_<Refusal>(m, "Refusal")
      .def_readonly("shape", &Refusal::shape)
      .def_readonly("cause", &Refusal::cause)
      .def_readonly("missing_bytes", &Refusal::missing_bytes)
      .def_readonly("stage_begin", &Refusal::stage_begin)
      .def_readonly("stage_end", &Refusal::stage_end)
      .def_readonly("layer", &Refusal::layer);
  py::class_<SearchResult>(m, "Result")
      .def_readonly("candidates", &SearchResult::candidates)
      .def_readonly("exhaustive", &SearchResult::exhaustive)
      .def_readonly("refusals", &SearchResult::refusals);
}

void bind_costs(py::module_& m) {
  py::enum_<ScheduleKind>(m, "ScheduleKind")
      .value("GPIPE", ScheduleKind::kGPipe)
      .value("ONE_F_ONE_B", ScheduleKind::kOneFOneB)
      .value("ZB_H1", ScheduleKind::kZbH1);
  py::enum_<PrefixPlacement>(m, "PrefixPlacement")
      .value("NONE", PrefixPlacement::kNone)
      .value("REPLICATED", PrefixPlacement::kReplicated)
      .value("PIPELINED", PrefixPlacement::kPipelined)
      .value("FILLED", PrefixPlacement::kFilled);
  py::class_<StageCosts>(m, "StageCosts")
      .def(py::init<>())
      .def_readwrite("forward_ns", &StageCosts::forward_ns)
      .def_readwrite("recompute_ns", &StageCosts::recompute_ns)
      .def_readwrite("input_grad_ns", &StageCosts::input_grad_ns)
      .def_readwrite("weight_grad_ns", &StageCosts::weight_grad_ns)
      .def_readwrite("forward_copy_ns", &StageCosts::forward_copy_ns)
      .def_readwrite("backward_copy_ns", &StageCosts::backward_copy_ns)
      .def_readwrite("has_backward", &StageCosts::has_backward)
      .def_readwrite("all_reduce_ns", &StageCosts::all_reduce_ns)
      .def_readwrite(
          "network_all_reduce_ns", &StageCosts::network_all_reduce_ns)
      .def_readwrite("state_bytes", &StageCosts::state_bytes)
      .def_readwrite("kept_bytes", &StageCosts::kept_bytes)
      .def_readwrite("recomputed_bytes", &StageCosts::recomputed_bytes)
      .def_readwrite(
          "kept_for_weights_bytes", &StageCosts::kept_for_weights_bytes)
      .def_readwrite("shared_bytes", &StageCosts::shared_bytes)
      .def_readwrite(
          "summed_gradient_bytes", &StageCosts::summed_gradient_bytes)
      .def_readwrite(
          "passing_gradient_bytes", &StageCosts::passing_gradient_bytes);
  py::class_<StepCosts>(m, "StepCosts")
      .def(py::init<>())
      .def_readwrite("schedule", &StepCosts::schedule)
      .def_readwrite("num_microbatches", &StepCosts::num_microbatches)
      .def_readwrite("num_recomputed", &StepCosts::num_recomputed)
      .def_readwrite("stages", &StepCosts::stages)
      .def_readwrite("prefix_placement", &StepCosts::prefix_placement)
      .def_readwrite("prefix_ns", &StepCosts::prefix_ns)
      .def_readwrite("prefix_grain_ns", &StepCosts::prefix_grain_ns)
      .def_readwrite("prefix_copy_ns", &StepCosts::prefix_copy_ns)
      .def_readwrite("cache_read_ns", &StepCosts::cache_read_ns)
      .def_readwrite("cache_wait_ns", &StepCosts::cache_wait_ns)
      .def_readwrite("process_ns", &StepCosts::process_ns)
      .def_readwrite("accumulation_steps", &StepCosts::accumulation_steps)
      .def_readwrite("cores_permille", &StepCosts::cores_permille)
      .def_readwrite("replicas_per_node", &StepCosts::replicas_per_node);
}

// Here the planner meets the simulator, which decides between its candidates.
Simulated simulated(const StepCosts& costs) {
  const simulator::StepResult result =
      simulator::simulate_step(costs, /*keep_timeline=*/false);
  return {result.step_ns, result.pipelines.front().bubble_fraction};
}

void bind_search(py::module_& m) {
  m.def(
      "search",
      [](const Profile& profile,
         const Cluster& cluster,
         const Request& request) {
        return search(profile, cluster, request, simulated);
      },
      py::arg("profile"),
      py::arg("cluster"),
      py::arg("request"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "step_costs",
      [](const Profile& profile,
         const Cluster& cluster,
         const Workload& workload,
         const Choice& choice) {
        Request request;
        request.workload = workload;
        request.cuts = choice.cuts;
        check(profile, cluster, workload.global_batch);
        check(request, profile, cluster);
        return step_costs(profile, cluster, workload, choice);
      },
      py::arg("profile"),
      py::arg("cluster"),
      py::arg("workload"),
      py::arg("choice"));
  m.def(
      "prefix_cuts",
      [](const Profile& profile,
         int64_t boundary,
         int64_t samples,
         int64_t num_devices) {
        const auto layers = static_cast<int64_t>(profile.layers.size());
        if (boundary < 1 || boundary > layers || samples < 1 ||
            num_devices < 1) {
          throw std::invalid_argument(
              "prefix_cuts: expected frozen layers of the profile, samples and "
              "devices");
        }
        return prefix_cuts(profile, boundary, samples, num_devices);
      },
      py::arg("profile"),
      py::arg("boundary"),
      py::arg("samples"),
      py::arg("num_devices"));
}

void bind_paper(py::module_& m) {
  m.def(
      "paper_partition",
      &paper::greedy_partition,
      py::arg("active_sizes"),
      py::arg("frozen_sizes"),
      py::arg("num_stages"));
  m.def(
      "paper_largest_load",
      &paper::largest_load,
      py::arg("active_sizes"),
      py::arg("frozen_sizes"),
      py::arg("num_stages"));
  m.def(
      "paper_compress",
      &paper::compress,
      py::arg("active_sizes"),
      py::arg("frozen_sizes"),
      py::arg("num_stages"),
      py::arg("largest_allowed"));
  m.def(
      "paper_num_microbatches",
      &paper::num_microbatches,
      py::arg("num_stages"));
}

}  // namespace

void bind_planner(py::module_& m) {
  bind_inputs(m);
  bind_costs(m);
  bind_request(m);
  bind_result(m);
  bind_search(m);
  bind_planner_solvers(m);
  bind_paper(m);
  bind_planner_transition(m);
}

}  // namespace pipetransformer::bindings
