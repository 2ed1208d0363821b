"""Where a run's wall-clock time goes: every second in exactly one phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from types import TracebackType
from typing import TypeVar

from pipetransformer.report.ranges import NO_RANGE, profiled

T = TypeVar("T")

OTHER = "other"


class _Phase:
    """A phase of a clock, entered once; several in each step, so of few calls."""

    __slots__ = ("_began", "_clock", "_name", "_range")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        clock, name = self._clock, self._name
        self._began = time.perf_counter()
        clock._charge(self._began)
        clock._open.append(clock._inner(name))
        self._range = profiled(name)
        if self._range is not NO_RANGE:
            self._range.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._range is not NO_RANGE:
            self._range.__exit__(kind, error, trace)
        clock, now = self._clock, time.perf_counter()
        clock._charge(now)
        whole = clock._open.pop()
        if clock.sink is not None:
            clock.sink(whole, self._began, now)


class Clock:
    """Charges each second since its making to the innermost phase that is open.

    A phase inside another one is named after both, ``"forward/cache_read"``, and its
    time is not in ``"forward"``: the seconds of all phases add up to the wall time.
    Outside every phase time goes to ``"other"``, the user's own code between calls.

    Only the thread that made the clock is followed; a phase on another thread runs
    beside this one's and charges nothing.

    Attributes:
        sink: Is called with the name, begin and end (``time.perf_counter()``) of each
            phase that has ended; None: nobody is.
    """

    def __init__(self) -> None:
        self.sink: Callable[[str, float, float], None] | None = None
        self._thread = threading.get_ident()
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.perf_counter()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Charge the time inside the ``with`` block to `name`.

        A profiler that runs shows it as the range ``pt::<name>``.
        """
        if threading.get_ident() != self._thread:
            return nullcontext()
        return _Phase(self, name)

    def each(self, name: str, items: Generator[T, None, None]) -> Iterator[T]:
        """Yield `items`, charging what making them takes to `name`."""
        with closing(items):
            while True:
                with self.phase(name):
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item

    def split(self, name: str, at: float) -> None:
        """Charge what the open phase has used since `at` to the phase `name` in it.

        Args:
            name: Of the inner phase.
            at: A ``time.perf_counter()``; a time before the last change of phase
                counts as that change.
        """
        if threading.get_ident() != self._thread:
            return
        now = time.perf_counter()
        began = min(max(at, self._since), now)
        self._charge(began)
        self._open.append(self._inner(name))
        self._charge(now)
        whole = self._open.pop()
        if self.sink is not None:
            self.sink(whole, began, now)

    def divide(self, began: float, parts: Iterable[tuple[str, float]]) -> None:
        """Charge what the open phase has used since `began` to phases beside it.

        Args:
            began: A ``time.perf_counter()``; a time before the last change of phase
                counts as that change.
            parts: Phases one after another, and when each ended; the open one keeps
                what is after the last.
        """
        if threading.get_ident() != self._thread:
            return
        self._charge(max(began, self._since))
        own = self._open.pop()
        outer = own.rpartition("/")[0]
        for name, end in parts:
            self._open.append(f"{outer}/{name}" if outer else name)
            self._charge(max(end, self._since))
            self._open.pop()
        self._open.append(own)

    def mark(self, text: str) -> None:
        """Tell the sink that something happened now: a phase without length."""
        if self.sink is not None:
            now = time.perf_counter()
            self.sink(text, now, now)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase so far."""
        self._charge(time.perf_counter())
        return dict(self._seconds)

    def elapsed(self) -> float:
        """Return the seconds since the clock was made."""
        return sum(self.seconds().values())

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of each phase since `before`, an earlier `seconds`."""
        now = self.seconds()
        spent = {name: now[name] - before.get(name, 0.0) for name in now}
        return {name: seconds for name, seconds in spent.items() if seconds > 0}

    def _inner(self, name: str) -> str:
        return f"{self._open[-1]}/{name}" if self._open else name

    def _charge(self, now: float) -> None:
        name = self._open[-1] if self._open else OTHER
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now
