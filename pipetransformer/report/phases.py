"""How long the parts of one change of plan took on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from pipetransformer.report.ranges import profiled

T = TypeVar("T")


class Phases:
    """Wall-clock seconds of each phase of one transformation.

    A phase inside another one is named after both, ``"prepare/group"``; its seconds
    are in the outer one's too. A phase that comes again adds up.

    Attributes:
        seconds: By phase, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, and show it to a profiler as ``pt::<name>``."""
        self._open.append(name)
        whole = "/".join(self._open)
        start = time.perf_counter()
        try:
            with profiled(name):
                yield
        finally:
            self._open.pop()
            spent = time.perf_counter() - start
            self.seconds[whole] = self.seconds.get(whole, 0.0) + spent


def parts_of(phases: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return each outermost phase with what each one inside of it took."""
    parts: dict[str, dict[str, T]] = {name: {} for name in phases if "/" not in name}
    for name, spent in phases.items():
        outer, _, inner = name.partition("/")
        if inner:
            parts.setdefault(outer, {})[inner] = spent
    return parts
