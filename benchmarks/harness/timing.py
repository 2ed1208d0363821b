"""Wall and CPU time of a step or a run, and which samples are undisturbed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# A system that keeps fewer cores busy than this mostly waits: see select_clean.
MIN_BUSY_CORES = 0.2


@dataclass(frozen=True)
class Sample:
    """Time taken by one step or one run.

    Attributes:
        wall_s: Elapsed seconds, > 0.
        cpu_s: CPU seconds of all threads and, for a run, of all reaped processes.
        foreign_s: CPU seconds of the whole machine that went to others meanwhile:
            other programs, and what the hypervisor took. None where unknown.
    """

    wall_s: float
    cpu_s: float
    foreign_s: float | None = None

    def __post_init__(self) -> None:
        if not self.wall_s > 0 or not self.cpu_s >= 0:
            raise ValueError(
                "sample: expected wall_s > 0 and cpu_s >= 0, "
                f"got {self.wall_s} and {self.cpu_s}"
            )

    @property
    def busy_cores(self) -> float:
        """CPU seconds per elapsed second."""
        return self.cpu_s / self.wall_s

    @property
    def foreign_share(self) -> float | None:
        """Share of the machine's CPU time that went to others; None if unknown."""
        if self.foreign_s is None:
            return None
        return self.foreign_s / ((os.cpu_count() or 1) * self.wall_s)


@dataclass(frozen=True)
class Selection:
    """Indices of the samples kept, ascending, and why the others were not.

    Attributes:
        kept: Indices.
        reasons: By the index of each sample that was dropped, ascending.
    """

    kept: tuple[int, ...]
    reasons: Mapping[int, str]

    @property
    def dropped(self) -> int:
        """Number of the samples that were dropped."""
        return len(self.reasons)


def measured(step: Callable[[], object]) -> Sample:
    """Time one call in this process, over all its threads.

    Reading the clocks costs about 1 us; time steps below 100 us in batches. A step
    on a GPU must end with a synchronization.
    """
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    wall_s = time.perf_counter() - wall
    return Sample(wall_s, time.process_time() - cpu)


def select_clean(samples: Sequence[Sample], *, tolerance: float = 0.1) -> Selection:
    """Drop the samples in which other programs kept one system from the cores.

    A thread that is ready but waits for a core uses wall time and no CPU time. So a
    disturbed sample keeps fewer cores busy than an undisturbed one of the *same*
    system. The reference is the 90 % quantile of ``busy_cores`` (the best of fewer
    than ten); a sample below ``1 - tolerance`` of it is dropped, unless others are
    known to have used too little CPU time to explain the gap (one foreign CPU second
    stops at most all cores the system keeps busy): then the system itself waited,
    and its slow run is a result, to be kept.

    Seen: programs that compete for our cores; a hypervisor's stolen time where the
    kernel knows of it. Taken for a disturbance if ``foreign_s`` is unknown or large:
    longer waits of the system itself for disk, network or locks.

    Not seen, because CPU and wall time grow together or neither side shows it: a lower
    clock rate; memory bandwidth, caches or a hyper-thread shared with others; time
    stolen without the kernel's knowledge; a system that spins while it waits; a
    disturbance that all samples share (``foreign_s`` shows that one). Interleaving
    the systems is the remedy for these, and a row of ``cpu_s`` makes them visible:
    equal work on an equal machine costs equal CPU time.

    A system that mostly waits, with a reference under ``MIN_BUSY_CORES``, has no CPU
    time to judge by; all its samples are kept.

    Args:
        samples: Samples of one system doing the same work.
        tolerance: Share of the reference, 0 < tolerance < 1.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance: expected within (0, 1), got {tolerance}")
    if not samples:
        return Selection((), {})
    ascending = sorted(sample.busy_cores for sample in samples)
    reference = ascending[math.ceil(0.9 * len(ascending)) - 1]

    def disturbed(sample: Sample) -> bool:
        if sample.busy_cores >= (1 - tolerance) * reference:
            return False
        if sample.foreign_s is None:
            return True
        missing_s = reference * sample.wall_s - sample.cpu_s
        return sample.foreign_s * max(1.0, reference) >= missing_s

    if reference < MIN_BUSY_CORES:
        return Selection(tuple(range(len(samples))), {})
    reasons = {
        i: _reason(sample, reference)
        for i, sample in enumerate(samples)
        if disturbed(sample)
    }
    kept = tuple(i for i in range(len(samples)) if i not in reasons)
    return Selection(kept, reasons)


def _reason(sample: Sample, reference: float) -> str:
    others = "unknown" if sample.foreign_s is None else f"{sample.foreign_s:.2f} s"
    return (
        f"disturbed: {sample.busy_cores:.2f} cores busy, undisturbed {reference:.2f}; "
        f"CPU time of others: {others}"
    )
