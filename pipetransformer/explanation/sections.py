"""The sections of a plan's explanation, in the order people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipetransformer.explanation import outcomes
from pipetransformer.explanation.document import (
    Section,
    Table,
    bare_megabytes,
    bare_milliseconds,
    columns,
    counted,
    hash_text,
    megabytes,
    milliseconds,
    percent,
    seconds,
)
from pipetransformer.planner import Candidate, Plan
from pipetransformer.simulator import Simulation

if TYPE_CHECKING:
    from pipetransformer.explanation.report import Explanation


def plan_sections(explanation: Explanation) -> list[Section]:
    """Return everything the explanation holds; what it does not hold is left out."""
    plan = explanation.plan
    found = [
        headline(plan),
        inputs(explanation),
        stages(explanation),
        limits(explanation),
        candidates(plan),
        refusals(plan),
        counterfactuals(explanation),
        reasons(plan),
        outcomes.transition(plan),
        idle(plan),
        outcomes.measured_section(explanation.measured),
    ]
    return [section for section in found if section.lines or section.table]


_HELD = "these times hold forward, backward, copies and all-reduce; no optimizer step"


def headline(plan: Plan) -> Section:
    """The shape and its order, its step and what that holds, what it runs."""
    name = f"plan {hash_text(plan.plan_hash)}: {plan.describe()}, {plan.schedule}"
    step = ["not simulated: written by hand"]
    if plan.simulated_step_ns:
        step = [
            f"predicted step {milliseconds(plan.predicted_step_ns)}, simulated "
            f"{milliseconds(plan.simulated_step_ns)} (at least "
            f"{milliseconds(plan.lower_bound_ns)}), bubble "
            f"{percent(plan.bubble_fraction)}",
            _HELD,
        ]
    frozen = "no frozen layers"
    if plan.boundary:
        frozen = f"{counted(plan.boundary, 'frozen layer')} {plan.prefix}"
        frozen += f", cache {plan.cache}"
    rows = (
        f"{plan.global_batch} rows a step, at most {plan.samples_per_microbatch} a "
        f"micro-batch; checkpoint {plan.checkpoint}; {frozen}"
    )
    return Section("", (name, *step, rows))


def inputs(explanation: Explanation) -> Section:
    """What the plan was made for."""
    given = explanation.inputs
    lines = []
    if given.model is not None:
        lines.append(
            f"model {given.model!r}: {given.num_layers} layers, {given.boundary} frozen"
        )
    if given.num_nodes is not None:
        lines.append(
            f"cluster: {counted(given.num_nodes, 'node')}, "
            f"{counted(given.devices_per_node or 0, 'device')} each with "
            f"{megabytes(given.device_memory_bytes)}"
        )
    lines.append(
        f"profile {hash_text(given.profile_hash)}, cluster "
        f"{hash_text(given.cluster_hash)}"
    )
    return Section("Inputs", (*lines, *given.notes))


def stages(explanation: Explanation) -> Section:
    """The plan as one row per stage."""
    cap = explanation.inputs.device_memory_bytes
    names = "stage, layers, f ms, b ms, w ms, MB, of cap, in flight, bubble"
    recompute = any(stage.recompute_ns for stage in explanation.stages)
    if recompute:
        names = names.replace("MB", "recompute ms, MB")
    rows = []
    for stage in explanation.stages:
        times = [stage.forward_ns, stage.input_grad_ns, stage.weight_grad_ns]
        times += [stage.recompute_ns] if recompute else []
        rows.append(
            (
                str(stage.stage),
                f"{stage.first_layer}-{stage.last_layer}",
                *(bare_milliseconds(ns) for ns in times),
                bare_megabytes(stage.device_bytes),
                _share(stage.device_bytes, cap),
                "-" if stage.in_flight is None else str(stage.in_flight),
                percent(stage.bubble_share),
            )
        )
    table = Table(columns(names), tuple(rows))
    return Section("Stages (times per micro-batch)", (), table)


def _share(part: int | None, whole: int | None) -> str:
    return percent(None if part is None or not whole else part / whole)


def limits(explanation: Explanation) -> Section:
    """What would shorten the step, largest gain first."""
    if not explanation.limits:
        return Section("Limiting resource")
    name, first = explanation.limiting_resource, explanation.limits[0]
    saved = milliseconds(first.gain_ns)
    sentence = "no single resource, twice as good, shortens the step"
    if name is not None:
        sentence = f"{name}: were it twice as good, each step would save {saved}"
    rows = tuple(
        (
            entry.resource,
            bare_milliseconds(entry.step_ns),
            bare_milliseconds(entry.gain_ns),
            entry.change,
        )
        for entry in explanation.limits
    )
    names = "resource, simulated ms, saved ms, if"
    table = Table(columns(names, resource="word", **{"if": "text"}), rows)
    return Section("Limiting resource", (sentence,), table)


def candidates(plan: Plan) -> Section:
    """The best candidates and why they lost."""
    if not plan.candidates:
        return Section("Candidates")
    frozen = plan.boundary > 0
    names = "K, R, M, cuts, schedule, estimate, bound, simulated, lost because"
    if frozen:
        names = names.replace("estimate", "frozen, estimate")
    head = columns(names, cuts="word", schedule="word", frozen="word", lost="text")
    rows = tuple(_candidate(entry, frozen) for entry in plan.candidates)
    marked = next((i for i, c in enumerate(plan.candidates) if not c.lost), None)
    title = f"Candidates (the best {len(rows)}; ms a step)"
    return Section(title, (), Table(head, rows, marked))


def _candidate(entry: Candidate, frozen: bool) -> tuple[str, ...]:
    return (
        *(str(count) for count in entry.shape),
        _cuts(entry.cuts),
        entry.schedule,
        *((_frozen_from(entry),) if frozen else ()),
        bare_milliseconds(entry.predicted_step_ns),
        bare_milliseconds(entry.lower_bound_ns),
        bare_milliseconds(entry.simulated_step_ns),
        entry.lost or "chosen",
    )


def _cuts(cuts: tuple[int, ...]) -> str:
    shown = [str(cut) for cut in cuts]
    return " ".join(shown if len(shown) <= 5 else [*shown[:2], "..", *shown[-2:]])


def _frozen_from(entry: Candidate) -> str:
    return entry.prefix if entry.cache == "none" else f"{entry.cache} cache"


def refusals(plan: Plan) -> Section:
    """Pipeline lengths that are out."""
    return Section("Does not fit", plan.refusals)


def counterfactuals(explanation: Explanation) -> Section:
    """The other ways to run the model."""
    if not explanation.counterfactuals:
        return Section("Other ways to run it")
    chosen = explanation.step_ns
    rows = []
    for entry in explanation.counterfactuals:
        ratio = "-"
        if entry.step_ns is not None and chosen > 0:
            ratio = f"{entry.step_ns / chosen:.2f} x"
        rows.append(
            (
                entry.title,
                bare_milliseconds(entry.step_ns),
                ratio,
                bare_megabytes(entry.peak_bytes),
                "; ".join(part for part in (entry.plan, entry.reason) if part),
            )
        )
    head = columns("way, simulated ms, of chosen, MB, how", way="word", how="text")
    return Section("Other ways to run it", (), Table(head, tuple(rows)))


def reasons(plan: Plan) -> Section:
    """Sentences of the search."""
    return Section("Reasons", tuple(f"- {reason}" for reason in plan.reasons))


def idle(plan: Plan) -> Section:
    """Devices that no replica uses."""
    if not plan.idle_devices:
        return Section("Idle devices")
    return Section(
        "Idle devices", (f"no work for {counted(plan.idle_devices, 'device')}",)
    )


def simulated(plan: Plan, run: Simulation, notes: tuple[str, ...]) -> Section:
    """What the simulator measured, one row per stage."""
    step = f"simulated: step {milliseconds(run.step_ns)}, bubble "
    step += f"{percent(run.bubble_fraction)}, exposed all-reduce "
    step += milliseconds(run.exposed_all_reduce_ns)
    lines = [f"plan {hash_text(plan.plan_hash)}: {plan.describe()}, {plan.schedule}"]
    lines.append(step)
    if run.num_steps > 1:
        lines.append(f"{run.num_steps} steps: {seconds(run.total_ns)}")
    rows = tuple(
        (
            str(stage),
            bare_milliseconds(busy),
            percent(busy / run.step_ns if run.step_ns else 0.0),
            bare_megabytes(peak),
        )
        for stage, (busy, peak) in enumerate(
            zip(run.stage_busy_ns, run.peak_bytes_per_stage, strict=True)
        )
    )
    table = Table(columns("stage, busy ms, of step, peak MB"), rows)
    return Section("Simulation", (*lines, *notes), table)
