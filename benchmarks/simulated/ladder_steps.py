"""A rung of the ladder: which mechanisms are on, and what its epochs then take.

Plans come from the planner's search, times from the simulator. A step that reads some
frozen blocks from the cache, computes others and writes them, or that runs them for
the whole mini-batch at once, is no plan's step; so this file alone changes the step
costs of a plan and hands them to the simulator behind its public call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipetransformer import _C
from pipetransformer.planner import Cluster, InfeasiblePlan, Plan, native, paper, search
from simulated.ladder_instance import (
    SAMPLE_BYTES,
    STATIC_LENGTH,
    TIMED_ROWS,
    Instance,
    Rates,
    boundary_of,
    profile_of,
)

MOST_COUNTS = 8
LARGEST_FACTOR = 6
PIPELINE_BATCH = 400  # of one pipeline, where that is what stays constant

_MODES = _C.simulator.PrefixMode
PREFIX_MODES = {
    "serial": _MODES.SERIAL,
    "spread": _MODES.BARRIER,
    "filled": _MODES.FILLED,
}


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One configuration.

    Attributes:
        name: For people.
        freezes: Whether layers freeze at all.
        lengths: "static" (K=8), "paper" (halved by the paper's rule) or "any".
        prefix: Where frozen layers run: "stages" (where they were), "serial" (the
            whole mini-batch at once on the first device, before the pipeline),
            "spread" over the K devices, or "filled" into the pipeline's gaps.
        cached: Their outputs are read from the cache, and computed once after each
            move of the boundary, from the old boundary on.
        batch_grows: A pipeline's batch stays the same, so steps grow with R and
            become fewer; else the global batch is constant.
        best_m: M by time; else the paper's: 16, and 4 at K=1.
        schedules: Of these the fastest.
        drops_input_grad: The first active layer computes none.
    """

    name: str
    freezes: bool = True
    lengths: str = "paper"
    prefix: str = "serial"
    cached: bool = False
    batch_grows: bool = False
    best_m: bool = False
    schedules: tuple[str, ...] = ("gpipe",)
    drops_input_grad: bool = False


@dataclass(frozen=True)
class Epoch:
    """What an epoch runs and how long it takes.

    Attributes:
        frozen_blocks: Of the model.
        num_stages: K.
        num_replicas: R.
        num_microbatches: M.
        schedule: Order of the cells.
        step_ns: A step, simulated.
        time_ns: A step's share of the epoch per ``global_batch`` samples, so rungs
            with other batches compare.
    """

    frozen_blocks: int
    num_stages: int
    num_replicas: int
    num_microbatches: int
    schedule: str
    step_ns: int
    time_ns: float


def microbatch_counts(num_stages: int, rows: int) -> list[int]:
    """Return the M that the planner tries for a replica's batch.

    K, 2K .. 6K and divisors of the batch between them, the nearest to 3K first, at
    most eight; none with less than one row.
    """
    counts = [num_stages * factor for factor in range(1, LARGEST_FACTOR + 1)]
    between = [
        m for m in range(num_stages, counts[-1] + 1) if m % num_stages and rows % m == 0
    ]
    between.sort(key=lambda m: abs(m - 3 * num_stages))
    counts += between[: MOST_COUNTS - len(counts)]
    return sorted(m for m in counts if m <= rows)


@dataclass(frozen=True)
class _Boundary:
    """Where the model is frozen to, and from where the prefix is computed."""

    frozen_blocks: int
    read_blocks: int
    moved: bool  # in this epoch


class Ladder:
    """Times rungs on an instance; what was simulated once is kept."""

    def __init__(self, instance: Instance, rates: Rates) -> None:
        self.instance = instance
        self.rates = rates
        self._cluster: Cluster = instance.cluster(rates)
        self._known: dict[object, Epoch | None] = {}

    def total_ns(self, rung: Rung) -> float:
        """Return the sum over the epochs, per step of ``global_batch`` samples."""
        return sum(epoch.time_ns for epoch in self.epochs(rung))

    def epochs(self, rung: Rung) -> list[Epoch]:
        """Return what each epoch runs.

        Raises:
            InfeasiblePlan: no length fits at some epoch.
        """
        frozen = self.instance.frozen_blocks()
        frozen = frozen if rung.freezes else [0] * len(frozen)
        made, before = [], 0
        for index, blocks in enumerate(frozen):
            moved = blocks != before
            read = (before if moved else blocks) if rung.cached else 0
            boundary = _Boundary(blocks, read, moved)
            tried = [
                epoch
                for length in self._lengths(rung, index, blocks)
                for epoch in self._choices(rung, boundary, length)
            ]
            if not tried:
                raise InfeasiblePlan(
                    f"{rung.name}, epoch {index}: expected a pipeline that fits, got "
                    "none"
                )
            made.append(min(tried, key=lambda epoch: epoch.time_ns))
            before = blocks
        return made

    def _lengths(self, rung: Rung, epoch: int, frozen_blocks: int) -> list[int]:
        if rung.lengths == "static":
            return [STATIC_LENGTH]
        if rung.lengths == "paper":
            return [self.instance.paper_lengths()[epoch]]
        active = 2 * (self.instance.num_blocks - frozen_blocks) + 1
        return list(range(1, min(self.instance.devices_per_node, active) + 1))

    def _choices(self, rung: Rung, boundary: _Boundary, length: int) -> Iterator[Epoch]:
        replicas = self.instance.num_nodes * (self.instance.devices_per_node // length)
        batch = self.instance.global_batch
        if rung.batch_grows:
            batch = PIPELINE_BATCH * replicas
        counts = [paper.num_microbatches(length)]
        if rung.best_m:
            counts = microbatch_counts(length, batch // replicas)
        for schedule in rung.schedules:
            for count in counts:
                how = (rung.prefix, rung.cached, rung.drops_input_grad, schedule)
                key = (boundary, length, count, batch, how)
                if key not in self._known:
                    self._known[key] = self._epoch(
                        rung, boundary, (length, count), batch, schedule
                    )
                found = self._known[key]
                if found is None:  # memory counts no activations: any M is too much
                    return
                yield found

    def _epoch(
        self,
        rung: Rung,
        boundary: _Boundary,
        shape: tuple[int, int],
        batch: int,
        schedule: str,
    ) -> Epoch | None:
        """Plan and simulate a step; None: it does not fit the memory."""
        length, count = shape
        left = rung.prefix == "stages"
        profile = profile_of(
            self.instance,
            self.rates,
            frozen_blocks=boundary.frozen_blocks,
            read_blocks=boundary.read_blocks,
            left_in_stages=left,
            drops_input_grad=rung.drops_input_grad,
        )
        try:
            plan = search(
                profile,
                self.instance.cluster(self.rates, length, count),
                global_batch=batch,
                boundary=0 if left else boundary_of(boundary.frozen_blocks),
                num_stages=None if left else length,
                num_microbatches=count,
                cuts=self._static_cuts() if left else None,
                schedules=(schedule,),
                prefix_placements=("replicated",),
                copies=self.rates.copies,
            )
        except InfeasiblePlan:
            return None
        costs = native.step_costs(plan, profile, self._cluster)
        self._add_prefix(costs, rung, boundary, plan)
        options = _C.simulator.StepOptions()
        options.prefix = PREFIX_MODES.get(rung.prefix, _MODES.BARRIER)
        step_ns = _C.simulator.step(costs, options).step_ns
        return Epoch(
            boundary.frozen_blocks,
            *plan.shape,
            schedule,
            step_ns,
            step_ns * self.instance.global_batch / batch,
        )

    def _add_prefix(
        self,
        costs: _C.planner.StepCosts,
        rung: Rung,
        boundary: _Boundary,
        plan: Plan,
    ) -> None:
        """Change the planner's prefix to the rung's, and add the cache's traffic.

        Reads and writes overlap with the step, which lasts no less than both.
        """
        if rung.prefix == "stages" or boundary.frozen_blocks == 0:
            return
        computed = boundary.frozen_blocks - boundary.read_blocks
        if rung.prefix == "serial":
            rows = -(-plan.global_batch // plan.num_replicas)
            whole = 2 * computed * self.rates.overhead_ns
            whole += computed * self.rates.block_forward_ns * rows // TIMED_ROWS
            costs.prefix_ns = [-(-whole // plan.num_microbatches)]
        if rung.cached:
            rows = -(-plan.global_batch // self.instance.num_nodes)
            once = rows * SAMPLE_BYTES * 10**9 // self.rates.cache_bytes_per_s
            reads = boundary.read_blocks > 0
            costs.cache_read_ns = once * (int(reads) + int(boundary.moved))
        if computed == 0:
            costs.prefix_copy_ns = 0

    def _static_cuts(self) -> tuple[int, ...]:
        profile = profile_of(self.instance, self.rates)
        return search(
            profile,
            self._cluster,
            global_batch=self.instance.global_batch,
            num_stages=STATIC_LENGTH,
            num_microbatches=paper.num_microbatches(STATIC_LENGTH),
            copies=self.rates.copies,
        ).cuts
