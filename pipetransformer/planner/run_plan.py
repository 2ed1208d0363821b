"""The part of a plan that is carried out."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pipetransformer.core import wire
from pipetransformer.planner.candidate import SCHEDULES, place_name, short_name

CHECKPOINT_MODES = ("never", "except_last", "always")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What of a plan the engine carries out; equal values run identically.

    All else of a plan is prediction or its basis. So is the tier of the cache: whether
    frozen layers are read from the node's slab, and how much it has, is no part of a
    plan.

    Args:
        boundary: index of the first active layer = number of frozen layers.
        num_stages: K, pipeline length.
        num_replicas: R, copies of the pipeline.
        num_microbatches: M, micro-batches per replica and step.
        cuts: K + 1 layer indices; stage k holds layers ``cuts[k]`` to
            ``cuts[k + 1] - 1``.
        schedule: order of the cells: ``"gpipe"``, ``"1f1b"`` or ``"zb-h1"``.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``.
        prefix: where the frozen layers run: ``"none"`` (there are none),
            ``"replicated"``, all of them on each device for a part of the rows,
            ``"pipelined"``, a chunk on each device that all rows pass, or
            ``"filled"``, all of them on each device, which runs those of the next
            batch while it waits for other stages.

    Raises:
        ValueError: a field is malformed or does not fit the others.
    """

    boundary: int
    num_stages: int
    num_replicas: int
    num_microbatches: int
    cuts: tuple[int, ...]
    schedule: str = "gpipe"
    checkpoint: str = "never"
    prefix: str = "none"

    def __post_init__(self) -> None:
        """Check every field."""
        wire.check_int(self.boundary, "plan boundary")
        for name in ("num_stages", "num_replicas", "num_microbatches"):
            wire.check_int(getattr(self, name), f"plan {name}", low=1)
        object.__setattr__(self, "cuts", wire.check_ints(self.cuts, "plan cuts"))
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
        wire.check_choice(self.schedule, "plan schedule", SCHEDULES)
        wire.check_choice(self.checkpoint, "plan checkpoint", CHECKPOINT_MODES)

    @property
    def run(self) -> RunPlan:
        """What is carried out, without the rest."""
        return RunPlan(**{e.name: getattr(self, e.name) for e in fields(RunPlan)})

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, R, M)."""
        return self.num_stages, self.num_replicas, self.num_microbatches

    @property
    def name(self) -> str:
        """K, R, M, and what is not usual: a schedule or place of frozen layers."""
        return short_name(self.shape, self.schedule, self.prefix)

    def describe(self) -> str:
        """Return one line, such as ``K=2 R=2 M=4 layers 4-8|9-13``."""
        stages = "|".join(
            f"{a}-{b - 1}" if b - a > 1 else f"{a}"
            for a, b in zip(self.cuts, self.cuts[1:], strict=False)
        )
        return (
            f"K={self.num_stages} R={self.num_replicas} M={self.num_microbatches} "
            f"layers {stages}{place_name(self.prefix)}"
        )
