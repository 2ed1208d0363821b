"""The planner's answer: an immutable plan with its reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from pipetransformer.planner import _fields

CHECKPOINT_MODES = ("never", "except_last", "always")
_CANDIDATE_FIELDS = (
    "num_stages",
    "num_replicas",
    "num_microbatches",
    "cuts",
    "predicted_step_ns",
    "lost",
)
_COUNTS = (
    "num_stages",
    "num_replicas",
    "num_microbatches",
    "samples_per_microbatch",
)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A shape the search compared.

    Args:
        num_stages: K.
        num_replicas: R.
        num_microbatches: M.
        cuts: K + 1 layer indices from the boundary to the number of layers.
        predicted_step_ns: predicted time of a step, ns.
        lost: why it was not chosen; empty for the chosen one.
    """

    num_stages: int
    num_replicas: int
    num_microbatches: int
    cuts: tuple[int, ...]
    predicted_step_ns: int
    lost: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the active layers are run, and why.

    Args:
        boundary: index of the first active layer = number of frozen layers.
        num_stages: K, pipeline length.
        num_replicas: R, copies of the pipeline.
        num_microbatches: M, micro-batches per replica and step.
        samples_per_microbatch: rows of the largest micro-batch.
        cuts: K + 1 layer indices; stage k holds layers ``cuts[k]`` to
            ``cuts[k + 1] - 1``.
        schedule: order of the cells; ``"gpipe"``.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``.
        predicted_step_ns: predicted time of a step, ns.
        bytes_per_stage: predicted device memory of each stage.
        idle_devices: devices of the cluster that no replica uses.
        candidates: the chosen shape and the best others, at most 8.
        reasons: sentences for people.
        profile_hash: of the profile the plan was made from.
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
    cuts: tuple[int, ...]
    schedule: str = "gpipe"
    checkpoint: str = "never"
    predicted_step_ns: int
    bytes_per_stage: tuple[int, ...]
    idle_devices: int = 0
    candidates: tuple[Candidate, ...] = ()
    reasons: tuple[str, ...] = ()
    profile_hash: int = 0
    plan_hash: int = -1

    def __post_init__(self) -> None:
        """Check every field and complete the hash."""
        for name in _COUNTS:
            _fields.check_int(getattr(self, name), f"plan {name}", low=1)
        for name in ("boundary", "predicted_step_ns", "idle_devices"):
            _fields.check_int(getattr(self, name), f"plan {name}")
        for name in ("cuts", "bytes_per_stage"):
            checked = _fields.check_ints(getattr(self, name), f"plan {name}")
            object.__setattr__(self, name, checked)
        self._check_shape()
        reasons = _fields.check_tuple(self.reasons, "plan reasons", _fields.check_str)
        object.__setattr__(self, "reasons", reasons)
        object.__setattr__(self, "candidates", tuple(self.candidates))
        content = self.to_dict()
        del content["plan_hash"]
        expected = _fields.content_hash(content)
        if self.plan_hash == -1:
            object.__setattr__(self, "plan_hash", expected)
        elif self.plan_hash != expected:
            raise ValueError(
                f"plan plan_hash: expected {expected} (of the content), got "
                f"{self.plan_hash}"
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
                f"got {list(self.cuts)}"
            )
        if len(self.bytes_per_stage) != self.num_stages:
            raise ValueError(
                f"plan bytes_per_stage: expected {self.num_stages} entries, got "
                f"{len(self.bytes_per_stage)}"
            )
        if self.schedule != "gpipe":
            raise ValueError(f"plan schedule: expected 'gpipe', got {self.schedule!r}")
        if self.checkpoint not in CHECKPOINT_MODES:
            raise ValueError(
                f"plan checkpoint: expected one of {CHECKPOINT_MODES}, got "
                f"{self.checkpoint!r}"
            )

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
        values["candidates"] = [
            {**asdict(candidate), "cuts": list(candidate.cuts)}
            for candidate in self.candidates
        ]
        return values

    def to_json(self) -> str:
        """Return canonical JSON text, equal for equal plans."""
        return _fields.canonical(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Args:
            text: JSON in the format of :meth:`to_json`.

        Returns:
            The plan; its hash was checked against the content.

        Raises:
            ValueError: malformed text, a missing, unknown or wrong field (named).
        """
        values = _fields.read_object(
            _fields.parse(text, "plan"),
            "plan",
            required=[entry.name for entry in fields(cls)],
            version=1,
        )
        values["candidates"] = _fields.check_tuple(
            values["candidates"], "plan candidates", _read_candidate
        )
        for name in ("profile_hash", "plan_hash"):
            if not isinstance(values[name], int) or isinstance(values[name], bool):
                raise ValueError(
                    f"plan {name}: expected an integer, got {values[name]!r}"
                )
        if values["plan_hash"] == -1:
            raise ValueError("plan plan_hash: expected at least 0, got -1")
        return cls(**values)  # type: ignore[arg-type]  # checked by __post_init__


def _read_candidate(value: object, what: str) -> Candidate:
    fields_ = _fields.read_object(value, what, required=_CANDIDATE_FIELDS)
    for name in ("num_stages", "num_replicas", "num_microbatches"):
        _fields.check_int(fields_[name], f"{what} {name}", low=1)
    _fields.check_int(fields_["predicted_step_ns"], f"{what} predicted_step_ns")
    _fields.check_str(fields_["lost"], f"{what} lost")
    fields_["cuts"] = _fields.check_ints(fields_["cuts"], f"{what} cuts")
    return Candidate(**fields_)  # type: ignore[arg-type]  # checked above
