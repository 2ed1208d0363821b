"""Why a plan is as it is: plain values, and their sections in reading order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

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
from pipetransformer.explanation.outcomes import Measurement
from pipetransformer.explanation.text import render
from pipetransformer.planner import Candidate, Plan
from pipetransformer.simulator import Simulation


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the plan was made for.

    Args:
        model: name in the profile; None when no profile was given.
        num_layers: of the model, frozen ones included.
        boundary: frozen layers.
        global_batch: rows of a step over all replicas.
        num_nodes: of the cluster; None when no cluster was given.
        devices_per_node: of the cluster.
        device_memory_bytes: what a stage may use on one device.
        profile_hash: of the profile the plan was made from.
        cluster_hash: of the cluster the plan was made for.
        notes: how much of the model trains, if not all; where the given files differ
            from those the plan was made from.
    """

    model: str | None
    num_layers: int
    boundary: int
    global_batch: int
    num_nodes: int | None
    devices_per_node: int | None
    device_memory_bytes: int | None
    profile_hash: int
    cluster_hash: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One stage of the plan; times per micro-batch, mean over a step's.

    Args:
        stage: 0-based.
        first_layer: of the model.
        last_layer: of the model, inclusive.
        device_bytes: predicted memory of its device; None: not known.
        forward_ns: None, as what follows, when no profile was given.
        input_grad_ns: 0 where no gradient is handed down.
        weight_grad_ns: 0 where nothing trains.
        recompute_ns: forward again before backward, where checkpointed.
        in_flight: most micro-batches whose activations it holds at once.
        bubble_share: part of the step in which it stands still, 0 to 1.
    """

    stage: int
    first_layer: int
    last_layer: int
    device_bytes: int | None
    forward_ns: int | None = None
    input_grad_ns: int | None = None
    weight_grad_ns: int | None = None
    recompute_ns: int | None = None
    in_flight: int | None = None
    bubble_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What the step would gain if one resource were twice as good.

    Args:
        resource: ``"stage 2"``, ``"device link"``, ``"replica link"``, ``"network"``,
            ``"prefix"``, ``"cache"`` or ``"memory"``.
        change: what was changed in the model, in words.
        step_ns: simulated step with the change.
        gain_ns: what the step loses by it; never below 0.
    """

    resource: str
    change: str
    step_ns: int
    gain_ns: int


@dataclass(frozen=True, kw_only=True)
class Counterfactual:
    """Another way to run the same model on the same cluster, in the same model.

    Args:
        name: for programs, such as ``"plain_ddp"``.
        title: for people.
        plan: such as ``"K=8 R=2 M=16 layers 0-3|..."``; empty if there is none.
        step_ns: simulated step; None if it cannot run.
        peak_bytes: of the fullest device; None if it cannot run.
        reason: why it cannot run, naming the rule; or a remark.
    """

    name: str
    title: str
    plan: str = ""
    step_ns: int | None = None
    peak_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan is as it is; ``str()`` gives text, :meth:`to_dict` JSON.

    Args:
        plan: the plan; its candidates, refusals, reasons and transition count.
        inputs: what it was made for.
        stages: one entry per stage.
        step_ns: simulated step, with profile and cluster where they were given.
        limits: largest gain first; empty when no profile was given. The first with
            a gain is the limiting resource.
        counterfactuals: empty when no profile was given.
        measured: predictions beside what happened, if there was a run.
        cache: why frozen activations are cached in the run or not, with its ``text``;
            None: not compared.
        codecs: what was decided on codecs of cached activations in a run, in words.
        decisions: what the freeze policy decided in a run and why, in words.
        saved: what freezing has saved in the run so far, in words.
    """

    plan: Plan
    inputs: Inputs
    stages: tuple[StageReport, ...]
    step_ns: int
    limits: tuple[Limit, ...] = ()
    counterfactuals: tuple[Counterfactual, ...] = ()
    measured: tuple[Measurement, ...] = ()
    cache: Mapping[str, object] | None = None
    codecs: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    saved: str = ""

    @property
    def freezing(self) -> tuple[str, ...]:
        """The decisions, and at last what they have saved if that is known."""
        return (*self.decisions, *([self.saved] if self.saved else []))

    @property
    def limiting_resource(self) -> str | None:
        """The resource whose improvement shortens the step most; None: none does."""
        first = next(iter(self.limits), None)
        return first.resource if first is not None and first.gain_ns > 0 else None

    def to_dict(self) -> dict[str, object]:
        """Return the explanation as JSON-ready values."""
        plan = self.plan.to_dict()
        return {
            "version": 1,
            "kind": "plan",
            "inputs": _plain(self.inputs),
            "plan": plan,
            "step_ns": self.step_ns,
            "stages": [_plain(stage) for stage in self.stages],
            "limiting_resource": self.limiting_resource,
            "limits": [_plain(limit) for limit in self.limits],
            "candidates": plan["candidates"],
            "refusals": plan["refusals"],
            "reasons": plan["reasons"],
            "counterfactuals": [_plain(entry) for entry in self.counterfactuals],
            "transition": plan["transition"],
            "idle_devices": plan["idle_devices"],
            "cache": None if self.cache is None else dict(self.cache),
            "codecs": list(self.codecs),
            "freezing": list(self.freezing),
            "measured": [
                {**_plain(entry), "error": entry.error} for entry in self.measured
            ],
        }

    def sections(self) -> list[Section]:
        """Return the report as sentences and tables, to be drawn."""
        return plan_sections(self)

    def __str__(self) -> str:
        """Return the report as plain text."""
        return render(self.sections())


def _plain(
    entry: Inputs | StageReport | Limit | Counterfactual | Measurement,
) -> dict[str, object]:
    values = asdict(entry)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


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
        cache(explanation),
        freezing(explanation),
        outcomes.transition(plan),
        idle(plan),
        outcomes.measured_section(explanation.measured),
    ]
    return [section for section in found if section.lines or section.table]


_DECISIONS = 10  # of the freeze policy, shown
_HELD = (
    "these times hold forward, backward, copies and all-reduce, and of optimizer and "
    "process what profile and cluster tell"
)


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
        place = plan.prefix
        if place == "filled":
            runs = plan.num_stages > 1 and plan.cache == "none"
            place = "in the bubbles of the step before" if runs else "replicated"
        frozen = f"{counted(plan.boundary, 'frozen layer')} {place}"
        frozen += f", cache {plan.cache}"
    rows = (
        f"{plan.global_batch} rows a step, at most {plan.samples_per_microbatch} a "
        f"micro-batch; checkpoint {plan.checkpoint}; {frozen}"
    )
    shared: tuple[str, ...] = ()
    if plan.accumulation_steps > 1:
        shared = (
            f"{plan.accumulation_steps} batches share an optimizer step and its "
            "all-reduce; a step here is one batch, the mean of them",
        )
    return Section("", (name, *step, rows, *shared))


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


def cache(explanation: Explanation) -> Section:
    """Why frozen activations are cached, or not, and in which codec."""
    told = explanation.cache
    lines = () if told is None else (str(told["text"]),)
    return Section("Activation cache", (*lines, *explanation.codecs))


def freezing(explanation: Explanation) -> Section:
    """What the freeze policy decided, newest last, and what that has saved."""
    told = explanation.decisions
    saved = (explanation.saved,) if explanation.saved else ()
    left_out = len(told) - _DECISIONS
    first = (f"{counted(left_out, 'decision')} before these",) if left_out > 0 else ()
    return Section("Freezing", (*first, *told[-_DECISIONS:], *saved))


def idle(plan: Plan) -> Section:
    """Devices that no replica uses."""
    if not plan.idle_devices:
        return Section("Idle devices")
    return Section(
        "Idle devices", (f"no work for {counted(plan.idle_devices, 'device')}",)
    )


def simulated(plan: Plan, run: Simulation, notes: tuple[str, ...]) -> Section:
    """What the simulator measured, one row per stage."""
    step = f"simulated: step {milliseconds(run.step_ns)}, "
    if plan.accumulation_steps > 1:
        step += f"that of the last of {plan.accumulation_steps} batches, which reduces "
        step += f"gradients, {milliseconds(run.last_step_ns)}, of which: "
    step += "bubble "
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
            percent(busy / run.last_step_ns if run.last_step_ns else 0.0),
            bare_megabytes(peak),
        )
        for stage, (busy, peak) in enumerate(
            zip(run.stage_busy_ns, run.peak_bytes_per_stage, strict=True)
        )
    )
    table = Table(columns("stage, busy ms, of step, peak MB"), rows)
    return Section("Simulation", (*lines, *notes), table)
