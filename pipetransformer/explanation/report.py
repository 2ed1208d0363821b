"""What an explanation of a plan holds: plain values, ready for text and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pipetransformer.explanation.document import Section
from pipetransformer.explanation.sections import plan_sections
from pipetransformer.explanation.text import render
from pipetransformer.planner import Plan


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
        notes: where the given files differ from those the plan was made from.
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
        resource: ``"stage 2"``, ``"device link"``, ``"network"``, ``"prefix"``,
            ``"cache"`` or ``"memory"``.
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
class Measurement:
    """A prediction beside what happened.

    Args:
        what: such as ``"step of epoch 3"`` or ``"pause before epoch 4"``.
        predicted_ns: None where nothing was predicted.
        measured_ns: wall time.
    """

    what: str
    predicted_ns: int | None
    measured_ns: int

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None where that means nothing."""
        if self.predicted_ns is None or self.measured_ns <= 0:
            return None
        return (self.predicted_ns - self.measured_ns) / self.measured_ns


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
    """

    plan: Plan
    inputs: Inputs
    stages: tuple[StageReport, ...]
    step_ns: int
    limits: tuple[Limit, ...] = ()
    counterfactuals: tuple[Counterfactual, ...] = ()
    measured: tuple[Measurement, ...] = ()

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
