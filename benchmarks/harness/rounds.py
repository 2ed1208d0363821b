"""Rounds of all systems: what disturbs one system of a round drops all of it.

A repeat that is dropped by itself flatters the system it belongs to, and one that is
kept though it was disturbed flatters the others. So each round, a run of every system
one after another, counts for all of its systems or for none. `judge` decides it from
the rounds' figures alone; `run_rounds` runs them and makes up for what was dropped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from harness.common import DroppedRepeat, Repeat, RunFailed, Series

Pace = Callable[[str, Repeat], float | None]


@dataclass(frozen=True)
class Limits:
    """Above which of these a round is disturbed.

    Attributes:
        foreign_share: Share of the machine's processor time that went to others
            during the run of a system.
        slow: A steady system's slowdown, its pace over the median of its paces, over
            the least slowdown of a steady system in the same round.
    """

    foreign_share: float = 0.03
    slow: float = 1.15


NO_LIMITS = Limits(math.inf, math.inf)


@dataclass(frozen=True)
class Round:
    """One run of every system.

    Attributes:
        turn: Its number, which decides the seed; a make-up has that of the round it
            replaces.
        repeats: By system; without those that failed.
        failures: What each failed run said, by system.
    """

    turn: int
    repeats: Mapping[str, Repeat]
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Judged:
    """A round and what disturbed it: nothing, or one text for each system and limit."""

    round: Round
    reasons: tuple[str, ...]


def no_pace(system: str, repeat: Repeat) -> float | None:
    """Return None: no system is steady."""
    return None


def judge(
    rounds: Sequence[Round], limits: Limits, *, pace: Pace = no_pace
) -> list[Judged]:
    """Tell what disturbed each round.

    Ratios are taken within a round. So a machine that is slower in one round than in
    another, as a virtual one at times is for minutes, disturbs none; one that slows
    some systems of a round and not the others does.

    Args:
        rounds: All rounds so far.
        limits: Same for all systems.
        pace: Seconds per unit of the same work in a system's run; None for a system
            that chooses what it does: a choice that was slow is its result, and must
            not be dropped as a disturbance. If only one system of a round has one, its
            median is what it is held against.
    """
    paces: dict[str, list[float]] = {}
    for each in rounds:
        for system, repeat in each.repeats.items():
            seconds = pace(system, repeat)
            if seconds is not None:
                paces.setdefault(system, []).append(seconds)
    usual = {system: statistics.median(found) for system, found in paces.items()}
    judged = []
    for each in rounds:
        reasons = []
        slowdowns = {}
        for system, repeat in each.repeats.items():
            share, seconds = repeat.sample.foreign_share, pace(system, repeat)
            if share is not None and share > limits.foreign_share:
                reasons.append(f"{system}: others used {share:.1%} of the machine")
            if seconds is not None:
                slowdowns[system] = seconds / usual[system]
        least = min(slowdowns.values()) if len(slowdowns) > 1 else 1.0
        reasons += [
            f"{system}: {slowdown:.2f} times its usual time, others {least:.2f} times"
            for system, slowdown in slowdowns.items()
            if slowdown > limits.slow * least
        ]
        judged.append(Judged(each, tuple(reasons)))
    return judged


@dataclass(frozen=True)
class Rounds:
    """All rounds of a benchmark, judged.

    Attributes:
        systems: In the order of the runs.
        judged: In the order of the runs.
        limits: By which they were judged.
    """

    systems: tuple[str, ...]
    judged: tuple[Judged, ...]
    limits: Limits

    @property
    def kept(self) -> list[Round]:
        """The first undisturbed round of each number, by number."""
        found: dict[int, Round] = {}
        for each in self.judged:
            if not each.reasons:
                found.setdefault(each.round.turn, each.round)
        return [found[turn] for turn in sorted(found)]

    @property
    def dropped(self) -> list[Judged]:
        """The disturbed rounds."""
        return [each for each in self.judged if each.reasons]

    def series(self) -> dict[str, Series]:
        """Return each system's repeats of the rounds that are kept."""
        return {system: self._series(system) for system in self.systems}

    def _series(self, system: str) -> Series:
        kept = [each for each in self.kept if system in each.repeats]
        rounds = [each.round for each in self.judged]
        return Series(
            system,
            tuple(each.repeats[system] for each in kept),
            self._dropped(system),
            tuple(r.failures[system] for r in rounds if system in r.failures),
            tuple(each.turn for each in kept),
        )

    def _dropped(self, system: str) -> tuple[DroppedRepeat, ...]:
        counted = {id(each) for each in self.kept}
        found = []
        for each in self.judged:
            if system in each.round.repeats and id(each.round) not in counted:
                why = "; ".join(each.reasons) or "made up for no round"
                repeat = each.round.repeats[system]
                found.append(DroppedRepeat(each.round.turn, repeat, why))
        return tuple(found)

    def __str__(self) -> str:
        """Return how many rounds count, and why the others do not."""
        lines = [f"{len(self.kept)} rounds count, {len(self.dropped)} dropped"]
        lines += [f"dropped: {'; '.join(each.reasons)}" for each in self.dropped]
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Return the limits, and what became of each round."""
        return {
            "limits": asdict(self.limits) if self.limits != NO_LIMITS else None,
            "runs": [
                {
                    "turn": each.round.turn,
                    "dropped": list(each.reasons),
                    "failed": dict(each.round.failures),
                }
                for each in self.judged
            ],
        }


def run_rounds(
    systems: Sequence[str],
    run: Callable[[str, int], Repeat],
    *,
    repeats: int,
    extra: int = 3,
    limits: Limits | None = None,
    pace: Pace = no_pace,
) -> Rounds:
    """Run all systems in turn, round after round (A B C, A B C, ...).

    After the planned rounds those that were disturbed are run again, all systems of
    them, until each number has an undisturbed one or `extra` rounds were added. A run
    that raises ``RunFailed`` is kept as a failure and its round is not run again.

    Args:
        systems: Distinct names, in the order of the runs.
        run: Runs one system once, given its name and the number of the round from 0.
        repeats: Undisturbed rounds wanted, >= 1.
        extra: Most rounds to make up for disturbed ones.
        limits: See `Limits`; None: its defaults.
        pace: See `judge`.
    """
    if repeats < 1 or len(set(systems)) != len(systems):
        raise ValueError(
            "run_rounds: expected repeats >= 1 and distinct systems, "
            f"got {repeats} and {list(systems)}"
        )
    limits = Limits() if limits is None else limits
    done: list[Round] = []

    def judged() -> list[Judged]:
        return judge(done, limits, pace=pace)

    def missing() -> list[int]:
        settled = {
            each.round.turn
            for each in judged()
            if each.round.failures or not each.reasons
        }
        return [turn for turn in range(repeats) if turn not in settled]

    for turn in range(repeats):
        done.append(_one_round(systems, run, turn))
    for _ in range(extra):
        if not (absent := missing()):
            break
        # The one with the fewest tries so far, so that no number takes them all.
        tries = [each.turn for each in done]
        done.append(_one_round(systems, run, min(absent, key=tries.count)))
    return Rounds(tuple(systems), tuple(judged()), limits)


def _one_round(
    systems: Sequence[str], run: Callable[[str, int], Repeat], turn: int
) -> Round:
    repeats, failures = {}, {}
    for system in systems:
        try:
            repeats[system] = run(system, turn)
        except RunFailed as failure:
            failures[system] = str(failure)
    return Round(turn, repeats, failures)
