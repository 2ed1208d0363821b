"""How long changes of plan stop training: defaults first, then what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from pipetransformer import _C
from pipetransformer.core import wire

TERMS = ("prepare", "move", "rewire", "first_step", "cache")
"""Parts of a pause, in the order they are paid."""

_NANOSECONDS = 1_000_000_000
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RunningMean:
    """Sum of measurements and what they are divided by; nothing is rounded away.

    Args:
        sum_ns: all measurements together, ns.
        count: how many there were, or the bytes that they were measured for.

    Raises:
        ValueError: a field is no integer, negative or too large.
    """

    sum_ns: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        """Check both fields."""
        wire.check_int(self.sum_ns, "pause sum_ns")
        wire.check_int(self.count, "pause count")

    @property
    def ns(self) -> int:
        """The mean, rounded down; 0 where nothing was measured."""
        return self.sum_ns // self.count if self.count else 0

    def observed(self, ns: int, per: int = 1) -> RunningMean:
        """Return the mean with one more measurement of `ns`, for `per` units."""
        native = _C.planner.observed(self._native(), ns, per)
        return RunningMean(sum_ns=native.sum_ns, count=native.count)

    def _native(self) -> _C.planner.RunningMean:
        return _C.planner.RunningMean(self.sum_ns, self.count)


@dataclass(frozen=True, kw_only=True)
class PauseModel:
    """Measured pauses of one run, by what they were spent on.

    A part that was never measured is predicted by a default that was calibrated on
    CPU; links of known rate by their rate.

    Args:
        prepare: agreement of all ranks on a plan that keeps the group.
        group: the same with a new group alongside the live one.
        move: hand-over of weights and moments to new replicas; counted in bytes.
        compare: what the phase ``move`` takes besides: replicas compare their states.
        rewire: rebuilding stages, workers, pipeline and DDP.
        first_step: what the first step takes more than those that follow.

    Source: the running means follow the run, so that a slow network or a large
    model corrects the defaults after the first change.
    """

    prepare: RunningMean = RunningMean()
    group: RunningMean = RunningMean()
    move: RunningMean = RunningMean()
    compare: RunningMean = RunningMean()
    rewire: RunningMean = RunningMean()
    first_step: RunningMean = RunningMean()

    def observed(
        self, phases: Mapping[str, float], *, kind: str, moved_bytes: int = 0
    ) -> PauseModel:
        """Return the model that has also seen one change of plan.

        Args:
            phases: seconds by phase: ``prepare``, ``move``, ``rewire``,
                ``first_step``; others are left out.
            kind: of the change, as in `Transition`; a new K or R builds a group.
            moved_bytes: bytes that were handed to new replicas; 0: ``move`` only
                compared states.

        Raises:
            ValueError: a negative or not finite duration.
        """
        means = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name, seconds in phases.items():
            if name not in means:
                continue
            duration = wire.check_float(seconds, f"pause {name}")
            nanoseconds = round(duration * _NANOSECONDS)
            if name == "prepare" and kind == "shape":
                name = "group"
            if name != "move":
                means[name] = means[name].observed(nanoseconds)
            elif moved_bytes > 0:
                moving = max(0, nanoseconds - self.compare.ns)
                means[name] = means[name].observed(moving, moved_bytes)
            else:
                means["compare"] = means["compare"].observed(nanoseconds)
        return PauseModel(**means)

    def to_dict(self) -> dict[str, object]:
        """Return the model as JSON-ready values."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: object) -> PauseModel:
        """Read what `to_dict` gave.

        Raises:
            ValueError: a missing, unknown or wrong field (named).
        """
        names = [entry.name for entry in fields(cls)]
        found = wire.read_object(
            value,
            "pauses",
            required=[name for name in names if name != "compare"],
            optional=["compare"],  # in no checkpoint of before
            version=_VERSION,
        )
        means = {}
        for name in found:
            mean = wire.read_object(
                found[name], f"pauses {name}", required=("sum_ns", "count")
            )
            means[name] = RunningMean(
                sum_ns=wire.check_int(mean["sum_ns"], f"pauses {name} sum_ns"),
                count=wire.check_int(mean["count"], f"pauses {name} count"),
            )
        return cls(**means)


def native_model(model: PauseModel) -> _C.planner.PauseModel:
    """Return the model as the extension takes it."""
    native = _C.planner.PauseModel()
    for entry in fields(model):
        mean: RunningMean = getattr(model, entry.name)
        setattr(native, entry.name, _C.planner.RunningMean(mean.sum_ns, mean.count))
    return native


def terms_of(pause: _C.planner.Pause) -> dict[str, int]:
    """Return a predicted pause as ns by term."""
    return {term: getattr(pause, f"{term}_ns") for term in TERMS}


def total_ns(terms_ns: Mapping[str, int]) -> int:
    """Return a whole pause; 2**62 ns where its terms are more."""
    return min(sum(terms_ns.values()), wire.LARGEST_INT)
