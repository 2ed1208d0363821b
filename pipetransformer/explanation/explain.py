"""Puts an explanation together from a plan, its profile and its cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipetransformer.explanation.alternatives import find_alternatives
from pipetransformer.explanation.document import megabytes
from pipetransformer.explanation.limits import find_limits
from pipetransformer.explanation.outcomes import Measurement
from pipetransformer.explanation.report import Explanation, Inputs
from pipetransformer.explanation.stages import bare_stages, stage_reports
from pipetransformer.planner import Cluster, Plan, Profile, SearchOptions
from pipetransformer.simulator import Simulation, simulate


def explain_plan(
    plan: Plan,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    *,
    measured: Sequence[Measurement] = (),
    codecs: Sequence[str] = (),
    freezing: Sequence[str] = (),
    saved: str = "",
    options: SearchOptions | None = None,
    cache: Mapping[str, object] | None = None,
    learned: bool = False,
    whole_batches: str = "",
) -> Explanation:
    """Explain a plan: stages, limiting resource, alternatives, reasons, prices.

    Pure: equal arguments give equal explanations. Plans a dozen times and simulates
    once per stage, so it takes as long as planning does, times ten.

    Args:
        plan: the plan.
        profile: its layers. Without profile or cluster only what the plan itself
            holds is told: no stage times, limits or alternatives.
        cluster: its machines.
        measured: predictions beside what happened in a run.
        codecs: what was decided on codecs of cached activations in a run, in words.
        freezing: what the freeze policy decided in a run and why, in words.
        saved: what freezing has saved in the run so far, in words.
        options: those of the search that made the plan; default: what the plan and
            its candidates show. Alternatives may differ in what they force.
        cache: why frozen activations are cached in a run or not; its ``text`` is shown.
        learned: the cluster is that of the plan, with rates learned since it was made.
        whole_batches: why the layers cannot take micro-batches, if so: alternatives
            have none either.

    Returns:
        The explanation.

    Raises:
        ValueError: the plan does not fit profile or cluster.
    """
    if profile is None or cluster is None:
        return Explanation(
            plan=plan,
            inputs=_inputs(plan, profile, cluster),
            stages=bare_stages(plan),
            step_ns=plan.simulated_step_ns,
            measured=tuple(measured),
            cache=cache,
            codecs=tuple(codecs),
            decisions=tuple(freezing),
            saved=saved,
        )
    options = replace(
        SearchOptions.shown_by(plan) if options is None else options,
        num_stages=None,
        num_microbatches=1 if whole_batches else None,
        cuts=None,
    )
    run = simulate(plan, profile, cluster)
    told = outline(plan, profile, cluster, run, learned=learned)
    if whole_batches:
        note = f"batches are not cut into micro-batches: {whole_batches}"
        told = replace(
            told, inputs=replace(told.inputs, notes=(*told.inputs.notes, note))
        )
    return replace(
        told,
        limits=find_limits(plan, profile, cluster, run.step_ns, options),
        counterfactuals=find_alternatives(plan, profile, cluster, options, run),
        measured=tuple(measured),
        cache=cache,
        codecs=tuple(codecs),
        decisions=tuple(freezing),
        saved=saved,
    )


def outline(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    run: Simulation,
    *,
    learned: bool = False,
) -> Explanation:
    """Return what needs no further planning: inputs and stages.

    Args:
        plan: the plan.
        profile: its layers.
        cluster: its machines.
        run: ``simulate(plan, profile, cluster)``.
        learned: as for `explain_plan`.
    """
    return Explanation(
        plan=plan,
        inputs=_inputs(plan, profile, cluster, learned=learned),
        stages=stage_reports(plan, profile, cluster, run),
        step_ns=run.step_ns,
    )


def _inputs(
    plan: Plan,
    profile: Profile | None,
    cluster: Cluster | None,
    *,
    learned: bool = False,
) -> Inputs:
    return Inputs(
        model=None if profile is None else profile.name,
        num_layers=plan.cuts[-1],
        boundary=plan.boundary,
        global_batch=plan.global_batch,
        num_nodes=None if cluster is None else cluster.num_nodes,
        devices_per_node=None if cluster is None else cluster.devices_per_node,
        device_memory_bytes=(None if cluster is None else cluster.device_memory_bytes),
        profile_hash=plan.profile_hash,
        cluster_hash=plan.cluster_hash,
        notes=(
            *training_notes(profile),
            *hash_notes(plan, profile, cluster, learned=learned),
        ),
    )


def training_notes(profile: Profile | None) -> tuple[str, ...]:
    """Say how much of a model trains, where that is not all of it."""
    layers = () if profile is None else profile.layers
    trains = sum(layer.gradient_bytes for layer in layers)
    whole = sum(layer.parameter_bytes for layer in layers)
    if trains == whole:
        return ()
    first = next((k for k, layer in enumerate(layers) if layer.trainable), len(layers))
    return (
        f"{megabytes(trains)} of {megabytes(whole)} of parameters train; nothing does "
        f"before layer {first}",
    )


def hash_notes(
    plan: Plan,
    profile: Profile | None,
    cluster: Cluster | None,
    *,
    learned: bool = False,
) -> tuple[str, ...]:
    """Say where a plan was made from another profile or cluster than those given.

    A plan written by hand, without hashes, was made from none.

    Args:
        plan: the plan.
        profile: the profile given.
        cluster: the cluster given.
        learned: as for `explain_plan`.
    """
    notes = []
    if profile is not None and plan.profile_hash not in (0, profile.hash):
        notes.append("note: the plan was made from another profile")
    if cluster is not None and plan.cluster_hash not in (0, cluster.hash):
        notes.append(
            "note: times hold what the run has learned since the plan was made"
            if learned
            else "note: the plan was made for another cluster"
        )
    return tuple(notes)
