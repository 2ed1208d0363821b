"""What a search of plans may choose from: one value, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pipetransformer.core import wire
from pipetransformer.planner.candidate import (
    CACHE_TIERS,
    COPY_MODELS,
    PREFIX_PLACEMENTS,
    SCHEDULES,
    Candidate,
)
from pipetransformer.planner.cluster import Cluster
from pipetransformer.planner.plan import Plan
from pipetransformer.planner.run_plan import CHECKPOINT_MODES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")
REPLICAS = ("auto", "all")
_NAMES = {
    "schedules": SCHEDULES,
    "prefix_placements": PREFIX_PLACEMENTS,
    "cache_tiers": CACHE_TIERS,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of `search` and `replan`, which take them one by one as well.

    `search` checks in addition what depends on profile, cluster or boundary.

    Args:
        global_batch: rows of a batch over all replicas; constant, so the number of
            optimizer steps does not depend on the plan.
        num_stages: forces K.
        max_replicas: limits R, which is at most nodes * floor(devices per node / K).
        min_replicas: no fewer are tried, but for a K of which no more fit.
        replicas: ``"auto"`` (the most there may be, and halves of it down to
            `min_replicas`, which leave devices idle) or ``"all"`` (the most alone for
            which a batch has rows enough, as in the paper).
        num_microbatches: forces M.
        cuts: forces the cuts, layer indices from the boundary to the number of
            layers; then K follows.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``.
        schedules: those the caller can run, of ``"gpipe"``, ``"1f1b"`` and
            ``"zb-h1"``. A loss outside the pipeline allows GPipe only.
        prefix_placements: where frozen layers may run, of ``"replicated"``,
            ``"pipelined"`` and ``"filled"``; the last is tried beside others only where
            there is something to fill: with several stages, and no tier that outputs
            are read from. The engine fills bubbles on slots of a host alone.
        cache_tiers: where frozen outputs may be read from, of ``"none"``,
            ``"device"``, ``"host"`` and ``"disk"``; those that the cluster has are
            compared.
        num_samples: of the data set; decides which share of it a tier can hold.
            None: all of it.
        copies: ``"overlapped"`` (copies between stages run alongside their compute) or
            ``"serial"`` (a copy keeps both devices busy).
        min_microbatch_samples: least rows of a micro-batch; 2 for batch norm.
        accumulation_steps: batches of `global_batch` rows that share an optimizer
            step. What is planned, and called a step here, is a batch: the mean of
            them, of which the last one's gradients are reduced.

    Raises:
        TypeError: a count or a cut is no integer.
        ValueError: one of them does not fit 62 bits; a name that does not exist.
    """

    global_batch: int
    num_stages: int | None = None
    max_replicas: int | None = None
    min_replicas: int = 1
    replicas: str = "auto"
    num_microbatches: int | None = None
    cuts: Sequence[int] | None = None
    checkpoint: str = "never"
    schedules: Sequence[str] = ("gpipe",)
    prefix_placements: Sequence[str] = ("replicated", "pipelined")
    cache_tiers: Sequence[str] = ("none",)
    num_samples: int | None = None
    copies: str = "overlapped"
    min_microbatch_samples: int = 1
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        """Check numbers and names, and keep sequences as tuples."""
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None or name in _NEEDED:
                check_integer(value, name)
        if self.cuts is not None:
            object.__setattr__(self, "cuts", _checked_cuts(self.cuts))
        wire.check_choice(self.checkpoint, "checkpoint", CHECKPOINT_MODES)
        wire.check_choice(self.copies, "copies", COPY_MODELS)
        wire.check_choice(self.replicas, "replicas", REPLICAS)
        for name, known in _NAMES.items():
            chosen = tuple(getattr(self, name))
            for entry in chosen:
                wire.check_choice(entry, name, known)
            object.__setattr__(self, name, chosen)

    @classmethod
    def shown_by(cls, plan: Plan) -> SearchOptions:
        """Return the options that a plan was chosen from, as far as it shows them."""
        compared: list[Plan | Candidate] = [plan, *plan.candidates]
        return cls(
            global_batch=plan.global_batch,
            checkpoint=plan.checkpoint,
            schedules=sorted({each.schedule for each in compared}),
            prefix_placements=cls.prefix_placements
            if plan.prefix == "none"
            else sorted(
                {each.prefix for each in compared}, key=PREFIX_PLACEMENTS.index
            ),
            cache_tiers=sorted({each.cache for each in compared}),
            num_samples=plan.num_samples,
            copies=plan.copies,
            accumulation_steps=plan.accumulation_steps,
        )

    def forbid(self, plan: Plan, num_active: int, cluster: Cluster) -> str:
        """Return why `plan` cannot go on with `num_active` layers; empty: it can."""
        no_room = self._no_room(plan, num_active, cluster)
        name = f"K={plan.num_stages} R={plan.num_replicas} M={plan.num_microbatches}"
        if no_room:
            return f"{name} cannot go on: {no_room}"
        for what, wanted, had in (
            ("K", self.num_stages, plan.num_stages),
            ("M", self.num_microbatches, plan.num_microbatches),
        ):
            if wanted is not None and wanted != had:
                return f"{name} cannot go on: {what}={wanted} is asked for"
        if self.max_replicas is not None and self.max_replicas < plan.num_replicas:
            return f"{name} cannot go on: at most {self.max_replicas} replicas"
        if self.cuts is not None and len(self.cuts) != plan.num_stages + 1:
            return f"{name} cannot go on: cuts {list(self.cuts)} are asked for"
        if plan.schedule not in self.schedules:
            return f"{name} cannot go on: {plan.schedule} is not allowed"
        return ""

    def _no_room(self, plan: Plan, num_active: int, cluster: Cluster) -> str:
        """Return what of layers, devices and rows is too few for `plan`, if any."""
        stages, replicas, microbatches = plan.shape
        if stages > num_active:
            return f"active layers left: {num_active}"
        if stages > cluster.devices_per_node:
            return f"devices per node: {cluster.devices_per_node}"
        room = cluster.num_nodes * (cluster.devices_per_node // stages)
        if replicas > room:
            return f"room for replicas: {room}"
        if self.global_batch // replicas // microbatches < self.min_microbatch_samples:
            return (
                f"{replicas} x {microbatches} micro-batches of at least "
                f"{self.min_microbatch_samples} rows, global batch: {self.global_batch}"
            )
        return ""

    def like(self, plan: Plan, boundary: int) -> SearchOptions:
        """Return these options narrowed to how `plan` runs.

        Args:
            plan: keeps its shape and schedule, and where its frozen layers run.
            boundary: frozen layers; if others than the plan's, these are placed anew.
        """
        stays = plan.boundary == boundary and plan.prefix in self.prefix_placements
        return dataclasses.replace(
            self,
            num_stages=plan.num_stages,
            max_replicas=plan.num_replicas,
            replicas="all",
            num_microbatches=plan.num_microbatches,
            schedules=(plan.schedule,),
            prefix_placements=(plan.prefix,) if stays else self.prefix_placements,
        )

    def exactly(self, candidate: Candidate) -> SearchOptions:
        """Return these options narrowed to one candidate."""
        prefix = candidate.prefix
        return dataclasses.replace(
            self,
            num_stages=candidate.num_stages,
            max_replicas=candidate.num_replicas,
            replicas="all",
            num_microbatches=candidate.num_microbatches,
            cuts=candidate.cuts,
            schedules=(candidate.schedule,),
            prefix_placements=(
                self.prefix_placements if prefix == "none" else (prefix,)
            ),
            cache_tiers=(candidate.cache,),
        )


_COUNTS = (
    "global_batch",
    "num_stages",
    "max_replicas",
    "min_replicas",
    "num_microbatches",
    "num_samples",
    "min_microbatch_samples",
    "accumulation_steps",
)
_NEEDED = (
    "global_batch",
    "min_replicas",
    "min_microbatch_samples",
    "accumulation_steps",
)


def merged(of: type[_T], value: _T | None, choices: Mapping[str, Any]) -> _T:
    """Return what a call gives as one value, field by field, or as both."""
    if value is None:
        return of(**choices)
    return dataclasses.replace(value, **choices) if choices else value


def check_integer(value: object, name: str) -> None:
    """Refuse an option that is no integer of 62 bits.

    Raises:
        TypeError: it is no integer.
        ValueError: it is too large.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if abs(value) > 2**62:
        raise ValueError(f"{name}: expected at most 2**62, got {value}")


def _checked_cuts(cuts: Sequence[int]) -> tuple[int, ...]:
    if isinstance(cuts, str) or not isinstance(cuts, Iterable):
        raise TypeError(f"cuts: expected layer indices, got {cuts!r}")
    found = tuple(cuts)
    for index, cut in enumerate(found):
        check_integer(cut, f"cuts[{index}]")
    return found
