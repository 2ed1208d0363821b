"""The planner's answer: an immutable plan with its reasons."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields

from pipetransformer.core import wire
from pipetransformer.planner.candidate import (
    CACHE_TIERS,
    COPY_MODELS,
    PREFIX_PLACEMENTS,
    Candidate,
)
from pipetransformer.planner.run_plan import RunPlan
from pipetransformer.planner.transition import Transition

_COUNTS = ("samples_per_microbatch", "global_batch", "accumulation_steps")
_NUMBERS = (
    "predicted_step_ns",
    "lower_bound_ns",
    "simulated_step_ns",
    "idle_devices",
)


@dataclass(frozen=True, kw_only=True)
class Plan(RunPlan):
    """How the active layers are run, which is `run`, and why.

    Args:
        samples_per_microbatch: rows of the largest micro-batch.
        global_batch: rows of a batch over all replicas.
        cache: tier that the frozen outputs are read from: ``"none"``, ``"device"``,
            ``"host"`` or ``"disk"``.
        copies: how copies between stages were counted: ``"overlapped"`` or
            ``"serial"``.
        num_samples: of the data set, which decides what share of it the cache serves;
            None: the cache holds all of it.
        accumulation_steps: batches that share an optimizer step. All times are of one
            batch, the mean of them.
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
        plan_hash: 64-bit hash of everything else; computed when left out.

    Raises:
        ValueError: a field is malformed or does not fit the others, or the hash is
            not that of the content.
    """

    samples_per_microbatch: int
    global_batch: int
    cache: str = "none"
    copies: str = "overlapped"
    num_samples: int | None = None
    accumulation_steps: int = 1
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
        super().__post_init__()
        for name in _COUNTS:
            wire.check_int(getattr(self, name), f"plan {name}", low=1)
        for name in _NUMBERS:
            wire.check_int(getattr(self, name), f"plan {name}")
        if self.num_samples is not None:
            wire.check_int(self.num_samples, "plan num_samples", low=1)
        stages = wire.check_ints(self.bytes_per_stage, "plan bytes_per_stage")
        object.__setattr__(self, "bytes_per_stage", stages)
        self._check_batch()
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

    def _check_batch(self) -> None:
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
        wire.check_choice(self.prefix, "plan prefix", PREFIX_PLACEMENTS)
        wire.check_choice(self.cache, "plan cache", CACHE_TIERS)
        wire.check_choice(self.copies, "plan copies", COPY_MODELS)
        bubble = wire.check_fraction(self.bubble_fraction, "plan bubble_fraction")
        object.__setattr__(self, "bubble_fraction", bubble)

    def to_dict(self) -> dict[str, object]:
        """Return the plan as JSON-ready values."""
        values: dict[str, object] = {"version": 1}
        for entry in fields(self):
            value = getattr(self, entry.name)
            values[entry.name] = list(value) if isinstance(value, tuple) else value
        if self.accumulation_steps == 1:
            del values["accumulation_steps"]  # as in plans written before it was there
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
        entries = fields(cls)
        values = wire.read_object(
            wire.parse(text, "plan"),
            "plan",
            required=[e.name for e in entries if e.default is MISSING],
            optional=[entry.name for entry in entries],
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
