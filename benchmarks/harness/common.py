"""What all benchmarks share; scripts import the parts from here.

A script runs its systems with ``interleave``, turns the repeats into ``Row``s and the
rows into ``Ratio``s, and writes both with ``write_json``. Speeds are compared as
ratios of one interleaved run only, because machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.child import RunFailed, run_child
from harness.machine import machine
from harness.provenance import begin
from harness.results import (
    MIN_REPEATS,
    Dropped,
    Ratio,
    RatioRefused,
    Row,
    Target,
    compared,
    ratio,
    write_json,
)
from harness.timing import Sample, Selection, measured, select_clean

__all__ = [
    "MIN_REPEATS",
    "Dropped",
    "Ratio",
    "RatioRefused",
    "Repeat",
    "Row",
    "RunFailed",
    "Sample",
    "Selection",
    "Series",
    "Target",
    "add_common_arguments",
    "begin",
    "compared",
    "interleave",
    "machine",
    "measured",
    "ratio",
    "run_child",
    "seeds_of",
    "select_clean",
    "write_json",
]


SUPERFLUOUS = "a repeat of this number counts already"


@dataclass(frozen=True)
class Repeat:
    """One run of one system: how it was timed and what it measured."""

    sample: Sample
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class DroppedRepeat:
    """A repeat that does not count, its number, and why it does not."""

    turn: int
    repeat: Repeat
    why: str


@dataclass(frozen=True)
class Series:
    """All repeats of one system.

    Attributes:
        system: Its name.
        clean: The undisturbed repeats, in the order of the runs.
        dropped: The others, in the order of the runs.
        failures: What each failed run said; a failed warm-up counts.
        turns: The number of each clean repeat; empty for 0, 1, 2, ...
    """

    system: str
    clean: tuple[Repeat, ...]
    dropped: tuple[DroppedRepeat, ...]
    failures: tuple[str, ...]
    turns: tuple[int, ...] = ()

    def row(self, metric: str, unit: str) -> Row:
        """One metric of all clean repeats."""
        values = tuple(repeat.metrics[metric] for repeat in self.clean)
        return Row(
            self.system,
            metric,
            unit,
            values,
            turns=self.turns,
            samples=tuple(repeat.sample for repeat in self.clean),
            dropped=tuple(
                Dropped(
                    each.turn, each.repeat.metrics[metric], each.why, each.repeat.sample
                )
                for each in self.dropped
            ),
            failed=len(self.failures),
            foreign_share=self._foreign_share(),
        )

    def _foreign_share(self) -> float | None:
        shares = [repeat.sample.foreign_share for repeat in self.clean]
        known = [share for share in shares if share is not None]
        return statistics.median(known) if known else None


def interleave(
    systems: Sequence[str],
    run: Callable[[str, int], Repeat],
    *,
    repeats: int,
    warmup: int = 1,
    extra: int = 2,
    tolerance: float = 0.1,
) -> dict[str, Series]:
    """Run the systems in turn (A B A B ...), so that all meet the same machine.

    After the planned rounds ``select_clean`` looks for disturbed repeats. Systems
    that lack clean ones run again, in turn, each at most ``extra`` times; a make-up
    has the number of the repeat that it replaces, so the pairs stay pairs. A run that
    raises ``RunFailed`` is kept as a failure and never made up for.

    Args:
        systems: Distinct names, in the order of the runs.
        run: Runs one system once, given its name and the number of the repeat, from
            0 (which may decide a seed); a warm-up has number 0.
        repeats: Clean repeats wanted per system, >= 1.
        warmup: Rounds before these; their results are not used.
        extra: Runs per system to make up for disturbed ones.
        tolerance: See ``select_clean``.
    """
    if repeats < 1 or len(set(systems)) != len(systems):
        raise ValueError(
            "interleave: expected repeats >= 1 and distinct systems, "
            f"got {repeats} and {list(systems)}"
        )
    runs = _Runs(systems, run, tolerance)
    for _ in range(warmup):
        runs.one_round(dict.fromkeys(systems, 0), keep=False)
    for turn in range(repeats):
        runs.one_round(dict.fromkeys(systems, turn), keep=True)
    for _ in range(extra):
        runs.one_round(runs.missing(repeats), keep=True)
    return {system: runs.series(system) for system in systems}


class _Runs:
    """What ``interleave`` has run so far."""

    def __init__(
        self,
        systems: Sequence[str],
        run: Callable[[str, int], Repeat],
        tolerance: float,
    ) -> None:
        self._run = run
        self._tolerance = tolerance
        self._done: dict[str, list[tuple[int, Repeat]]] = {s: [] for s in systems}
        self._failures: dict[str, list[str]] = {system: [] for system in systems}
        self._failed: dict[str, set[int]] = {system: set() for system in systems}

    def one_round(self, turns: Mapping[str, int], *, keep: bool) -> None:
        """Run each system's repeat; failures are kept in any case."""
        for system, turn in turns.items():
            try:
                repeat = self._run(system, turn)
            except RunFailed as failure:
                self._failures[system].append(str(failure))
                self._failed[system].add(turn)
                continue
            if keep:
                self._done[system].append((turn, repeat))

    def missing(self, repeats: int) -> dict[str, int]:
        """Each system's first disturbed repeat; failed ones are not made up for."""
        found = {}
        for system in self._done:
            settled = self._failed[system].union(self.series(system).turns)
            absent = [turn for turn in range(repeats) if turn not in settled]
            if absent:
                found[system] = absent[0]
        return found

    def series(self, system: str) -> Series:
        """The repeats so far, judged together."""
        done = self._done[system]
        samples = [repeat.sample for _, repeat in done]
        selection = select_clean(samples, tolerance=self._tolerance)
        clean: dict[int, Repeat] = {}
        dropped = []
        for i, (turn, repeat) in enumerate(done):
            if i in selection.reasons:
                dropped.append(DroppedRepeat(turn, repeat, selection.reasons[i]))
            elif turn in clean:
                dropped.append(DroppedRepeat(turn, repeat, SUPERFLUOUS))
            else:
                clean[turn] = repeat
        return Series(
            system,
            tuple(clean[turn] for turn in sorted(clean)),
            tuple(dropped),
            tuple(self._failures[system]),
            tuple(sorted(clean)),
        )


def add_common_arguments(
    parser: argparse.ArgumentParser, *, repeats: int = MIN_REPEATS
) -> None:
    """Add ``--json``, ``--quick``, ``--repeats``, ``--seed`` and ``--seeds``."""
    add = parser.add_argument
    add("--json", type=Path, metavar="PATH", help="write the figures here")
    add("--quick", action="store_true", help="<= 45 s; not for publication")
    add("--repeats", type=int, default=repeats, help="clean repeats per system")
    add("--seed", type=int, default=0, help="of the first repeat")
    add("--seeds", type=int, nargs="+", help="in place of --repeats and --seed")


def seeds_of(args: argparse.Namespace) -> list[int]:
    """Return the seed of each repeat: those given, or one after another."""
    return args.seeds or list(range(args.seed, args.seed + args.repeats))
