"""The policies that need no measurements: never, by hand, by list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from pipetransformer.autofreeze.policy import (
    FreezeStatistics,
    Policy,
    Progress,
    State,
    check_count,
)


class Never(Policy):
    """Freezes nothing that trains: the baseline of every comparison."""

    def _choose(self, progress: Progress, stats: FreezeStatistics) -> int:
        return 0


class Manual(Policy):
    """Freezes what the user asked for last, at the next evaluation point."""

    def __init__(self, *, dry_run: bool = False) -> None:
        super().__init__(dry_run=dry_run)
        self._requested = 0

    def freeze(self, num_units: int) -> None:
        """Ask for `num_units` frozen front units; a smaller number unfreezes.

        Raises:
            ValueError: if the model has fewer units (found in ``bind`` where the
                policy is not bound yet).
        """
        self._requested = check_count("num_frozen", num_units, self._num_units)

    def _choose(self, progress: Progress, stats: FreezeStatistics) -> int:
        return self._requested

    def _check_units(self, num_units: int) -> None:
        check_count("num_frozen", self._requested, num_units)

    def _get_state(self) -> State:
        return {"num_frozen": self._requested}

    def _set_state(self, state: State) -> None:
        self.freeze(check_count("policy state num_frozen", state["num_frozen"]))


class Schedule(Policy):
    """Freezes by a list: entry T at evaluation point T, the last one from then on.

    Args:
        counts: frozen units per evaluation point, from point 0; may fall again.
        dry_run: log what would be frozen, freeze nothing.

    Raises:
        ValueError: an empty list or a negative count; a count above the number of
            units is found in ``bind``.
        TypeError: no sequence.
    """

    def __init__(self, counts: Sequence[int], *, dry_run: bool = False) -> None:
        super().__init__(dry_run=dry_run)
        if isinstance(counts, (Mapping, Set)) or not isinstance(counts, Sequence):
            raise TypeError(
                "counts: expected a list, the frozen units of evaluation point T at "
                f"place T, got {type(counts).__name__}"
            )
        if len(counts) == 0:
            raise ValueError("counts: expected at least one count, got none")
        self._counts = tuple(check_count("counts", count) for count in counts)

    def _choose(self, progress: Progress, stats: FreezeStatistics) -> int:
        return self._counts[min(progress.epoch, len(self._counts) - 1)]

    def _find_change(self, progress: Progress) -> int | None:
        last = len(self._counts) - 1
        counts = [max(count, self.starting_units) for count in self._counts]
        now = counts[min(progress.epoch, last)]
        later = range(progress.epoch + 1, last + 1)
        return next((t for t in later if counts[t] != now), None)

    def _get_settings(self) -> dict[str, object]:
        return {"counts": list(self._counts)}

    def _check_units(self, num_units: int) -> None:
        for count in self._counts:
            check_count("counts", count, num_units)
