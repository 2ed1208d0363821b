"""The planner's answer: an immutable plan with its reasons."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pipetransformer.core import wire
from pipetransformer.planner.candidate import (
    CACHE_TIERS,
    COPY_MODELS,
    PREFIX_PLACEMENTS,
    SCHEDULES,
    Candidate,
)
from pipetransformer.planner.transition import Transition

CHECKPOINT_MODES = ("never", "except_last", "always")
_COUNTS = (
    "num_stages",
    "num_replicas",
    "num_microbatches",
    "samples_per_microbatch",
    "global_batch",
)
_NUMBERS = (
    "boundary",
    "predicted_step_ns",
    "lower_bound_ns",
    "simulated_step_ns",
    "idle_devices",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the active layers are run, and why.

    Args:
        boundary: index of the first active layer = number of frozen layers.
        num_stages: K, pipeline length.
        num_replicas: R, copies of the pipeline.
        num_microbatches: M, micro-batches per replica and step.
        samples_per_microbatch: rows of the largest micro-batch.
        global_batch: rows of a step over all replicas.
        cuts: K + 1 layer indices; stage k holds layers ``cuts[k]`` to
            ``cuts[k + 1] - 1``.
        schedule: order of the cells: ``"gpipe"``, ``"1f1b"`` or ``"zb-h1"``.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``.
        prefix: where the frozen layers run: ``"none"`` (there are none),
            ``"replicated"`` or ``"pipelined"``.
        cache: tier that the frozen outputs are read from: ``"none"``, ``"device"``,
            ``"host"`` or ``"disk"``.
        copies: how copies between stages were counted: ``"overlapped"`` or
            ``"serial"``.
        num_samples: of the data set, which decides what share of it the cache serves;
            None: the cache holds all of it.
        predicted_step_ns: the closed form's estimate of a step, ns.
        lower_bound_ns: no step with these cuts takes less, ns.
        simulated_step_ns: simulated time of a step, ns; what decided.
        bubble_fraction: share of the stages' time, from the first forward to the last
            backward, in which they stand still; simulated.
        bytes_per_stage: predicted device memory of each stage; empty: not known.
        idle_devices: devices of the cluster that no replica uses.
        transition: price of changing to this plan; None for a first plan.
        candidates: the chosen one and the best others, at most 8.
        refusals: why each infeasible pipeline length is out, as sentences.
        reasons: why this one was chosen, as sentences.
        profile_hash: of the profile the plan was made from.
        cluster_hash: of the cluster the plan was made for.
        plan_hash: 64-bit hash of everything above; computed when left out.

    Raises:
        ValueError: a field is malformed or does not fit the others, or the hash is
            not that of the content.
    """

    boundary: int
    num_stages: int
    num_replicas: int
    num_microbatches: int
    samples_per_microbatch: int
    global_batch: int
    cuts: tuple[int, ...]
    schedule: str = "gpipe"
    checkpoint: str = "never"
    prefix: str = "none"
    cache: str = "none"
    copies: str = "overlapped"
    num_samples: int | None = None
    predicted_step_ns: int = 0
    lower_bound_ns: int = 0
    simulated_step_ns: int = 0
    bubble_fraction: float = 0.0
    bytes_per_stage: tuple[int, ...] = ()
    idle_devices: int = 0
    transition: Transition | None = None
    candidates: tuple[Candidate, ...] = ()
    refusals: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    profile_hash: int = 0
    cluster_hash: int = 0
    plan_hash: int = -1

    def __post_init__(self) -> None:
        """Check every field and complete the hash."""
        for name in _COUNTS:
            wire.check_int(getattr(self, name), f"plan {name}", low=1)
        for name in _NUMBERS:
            wire.check_int(getattr(self, name), f"plan {name}")
        if self.num_samples is not None:
            wire.check_int(self.num_samples, "plan num_samples", low=1)
        for name in ("cuts", "bytes_per_stage"):
            checked = wire.check_ints(getattr(self, name), f"plan {name}")
            object.__setattr__(self, name, checked)
        self._check_shape()
        self._check_choices()
        for name in ("reasons", "refusals"):
            sentences = wire.check_tuple(
                getattr(self, name), f"plan {name}", wire.check_str
            )
            object.__setattr__(self, name, sentences)
        object.__setattr__(self, "candidates", tuple(self.candidates))
        content = self.to_dict()
        del content["plan_hash"]
        expected = wire.content_hash(content)
        if self.plan_hash == -1:
            object.__setattr__(self, "plan_hash", expected)
        elif self.plan_hash != expected:
            raise ValueError(
                f"plan plan_hash: expected {expected} (of the content), got "
                f"{wire.shown(self.plan_hash)}"
            )

    def _check_shape(self) -> None:
        if len(self.cuts) != self.num_stages + 1:
            raise ValueError(
                f"plan cuts: expected {self.num_stages + 1} layer indices "
                f"(num_stages + 1), got {len(self.cuts)}"
            )
        if self.cuts[0] != self.boundary or any(
            a >= b for a, b in zip(self.cuts, self.cuts[1:], strict=False)
        ):
            raise ValueError(
                f"plan cuts: expected increasing layer indices from {self.boundary}, "
                f"got {wire.shown(list(self.cuts))}"
            )
        replica_rows = -(-self.global_batch // self.num_replicas)
        rows = -(-replica_rows // self.num_microbatches)
        if self.samples_per_microbatch != rows:
            raise ValueError(
                f"plan samples_per_microbatch: expected {rows} (global_batch "
                f"{self.global_batch} over {self.num_replicas} x "
                f"{self.num_microbatches} micro-batches, rounded up), got "
                f"{self.samples_per_microbatch}"
            )
        if self.bytes_per_stage and len(self.bytes_per_stage) != self.num_stages:
            raise ValueError(
                f"plan bytes_per_stage: expected {self.num_stages} entries, got "
                f"{len(self.bytes_per_stage)}"
            )

    def _check_choices(self) -> None:
        wire.check_choice(self.schedule, "plan schedule", SCHEDULES)
        wire.check_choice(self.checkpoint, "plan checkpoint", CHECKPOINT_MODES)
        wire.check_choice(self.prefix, "plan prefix", PREFIX_PLACEMENTS)
        wire.check_choice(self.cache, "plan cache", CACHE_TIERS)
        wire.check_choice(self.copies, "plan copies", COPY_MODELS)
        bubble = wire.check_fraction(self.bubble_fraction, "plan bubble_fraction")
        object.__setattr__(self, "bubble_fraction", bubble)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, R, M)."""
        return self.num_stages, self.num_replicas, self.num_microbatches

    def describe(self) -> str:
        """Return one line, such as ``K=2 R=2 M=4 layers 4-8|9-13``."""
        stages = "|".join(
            f"{a}-{b - 1}" if b - a > 1 else f"{a}"
            for a, b in zip(self.cuts, self.cuts[1:], strict=False)
        )
        return (
            f"K={self.num_stages} R={self.num_replicas} M={self.num_microbatches} "
            f"layers {stages}"
        )

    def to_dict(self) -> dict[str, object]:
        """Return the plan as JSON-ready values."""
        values: dict[str, object] = {"version": 1}
        for entry in fields(self):
            value = getattr(self, entry.name)
            values[entry.name] = list(value) if isinstance(value, tuple) else value
        values["candidates"] = [each.to_dict() for each in self.candidates]
        if self.transition is not None:
            values["transition"] = self.transition.to_dict()
        return values

    def to_json(self) -> str:
        """Return canonical JSON text, equal for equal plans."""
        return wire.canonical(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Args:
            text: JSON in the format of :meth:`to_json`. A plan written by hand needs
                the counts, ``boundary`` and ``cuts`` only.

        Returns:
            The plan; a hash that is there was checked against the content.

        Raises:
            ValueError: malformed text, a missing, unknown or wrong field (named).
        """
        values = wire.read_object(
            wire.parse(text, "plan"),
            "plan",
            required=("boundary", "cuts", *_COUNTS),
            optional=[entry.name for entry in fields(cls)],
            version=1,
        )
        values["candidates"] = wire.check_tuple(
            values.get("candidates", ()), "plan candidates", Candidate.from_dict
        )
        if values.get("transition") is not None:
            values["transition"] = Transition.from_dict(values["transition"])
        for name in ("profile_hash", "cluster_hash", "plan_hash"):
            if name in values:
                wire.check_hash(values[name], f"plan {name}")
        return cls(**values)  # type: ignore[arg-type]  # checked by __post_init__
