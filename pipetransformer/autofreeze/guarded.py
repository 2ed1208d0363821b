"""Freezes when little is left to learn, and takes it back when that was wrong."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal

from pipetransformer import _C
from pipetransformer.autofreeze.policy import (
    FreezeStatistics,
    Policy,
    Progress,
    State,
    check_count,
)

_logger = logging.getLogger(__name__)

Monitor = tuple[str, Literal["min", "max"]]

_WARM_UP = 0.1  # of the steps: nothing freezes, and the first mean is taken
_BACK_TO_STAKE = 3.0  # times the bar, of a freeze below it
_BACK_BY = 0.5  # of the loss above it, of a freeze that the monitor allowed
_MOST_COMES_BACK = 3.0  # times the first mean: one bad batch is no new task
_FALLS_BY = 0.25  # the training loss, while the monitor does not improve
_RATE_FALLS = 3.0  # times, from one point to the next: a step of a schedule
_LEAST_LEFT = 2  # intervals, for which it is worth to thaw then
_COOL_DOWN = 3  # evaluation points without a freeze after an unfreeze
_MOST_UNFREEZES = 2  # then the layers stay active


class Guarded(Policy):
    """Freezes while little is left to learn; the default of ``freeze=``.

    Whatever a layer still learns lowers the training loss by no more than what is left
    of it. So the mean loss since the last evaluation point, over the first mean of the
    run, says what a freeze puts at stake. While that is above `stake` nothing freezes,
    and the run is the unfrozen one bit for bit. Else each point freezes the share
    `alpha` of the active units, as the paper's cap does. The first mean is that of the
    first tenth of the steps, at least of the first interval.

    With a `monitor` a held-out metric counts, too: when the last `patience` evaluations
    have not improved it, while the training loss has fallen by a quarter, what the
    front layers go on learning helps the training set alone, and they may freeze. While
    it stands at its first value, nothing may be learned yet: that does not count.

    All units unfreeze when the loss comes back: to 3 times the stake below which they
    froze, as when data or labels have changed, or to 1.5 times the least loss since the
    monitor let them freeze; was that 0 or less, by half of its size or of the first
    mean's, whichever is larger. What has come back is from then on the first mean, if
    it is larger, up to 3 times as large. Then nothing freezes for 3 points, and after
    the second time nothing at all. They also unfreeze, as often as that happens, when
    the learning rate falls to a third or less from one point to the next while more
    than 3 times the stake is left to learn. Nothing freezes in the first tenth of the
    steps.

    Args:
        alpha: share of the active units that a point may freeze, in [0, 1).
        stake: share of the first mean loss below which freezing is harmless, in
            (0, 1]. That is of a loss whose best value is 0, as cross-entropy; while it
            is below 0 the loss decides nothing. A smaller share where training begins
            far worse than a constant prediction, as with targets that were not
            normalised.
        monitor: name of a metric of ``engine.evaluate``, and whether smaller ("min") or
            larger ("max") values are better. Every evaluation with a metric of that
            name counts; where several sets are evaluated, name the set as well:
            ``"valid/accuracy"`` with ``evaluate(..., name="valid")``, ``"eval/loss"``
            without a name. None: the training loss alone decides.
        patience: evaluations in a row that have not improved the monitor, >= 1. Of
            several between two points the last one counts. Where ``Progress`` does not
            tell how many there were, a value other than the last one is a new one.
        min_active: units that stay active; None: an eighth of them, at least one.
        dry_run: log what would be frozen, freeze nothing.

    Raises:
        TypeError: a setting of a wrong kind.
        ValueError: a setting out of range; a min_active above the number of units is
            found in ``bind``.

    Source: issue 20; docs/freezing.md says what else was tried.
    """

    needs = frozenset({"loss"})

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        stake: float = 0.005,
        monitor: Monitor | None = None,
        patience: int = 2,
        min_active: int | None = None,
        dry_run: bool = False,
    ) -> None:
        super().__init__(dry_run=dry_run)
        for name, value in (("alpha", alpha), ("stake", stake)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}: expected a number, got {value!r}")
        _C.autofreeze.check_alpha(alpha)
        if not 0.0 < stake <= 1.0:
            raise ValueError(f"stake: expected a number in (0, 1], got {stake}")
        if check_count("patience", patience) == 0:
            raise ValueError("patience: expected a count >= 1, got 0")
        self._alpha, self._stake = float(alpha), float(stake)
        self._monitor, self._patience = _checked_monitor(monitor), patience
        self._min_active = (
            None if min_active is None else check_count("min_active", min_active)
        )
        self._point = 0
        self._num_frozen = 0
        self._first: float | None = None  # mean loss of the first steps
        self._first_steps = 0  # that it is taken over
        self._step = 0  # of the last evaluation point
        self._returns_at = 0.0  # the loss at which all units unfreeze
        self._best: float | None = None  # of the monitor
        self._last: float | None = None
        self._evaluations = 0  # that had it, as far as told
        self._best_loss: float | None = None  # of training, when that was evaluated
        self._moved = False  # the best is better than the first
        self._stale = 0  # evaluations since the best one
        self._rate = 0.0  # learning rate at the last point; 0: none is known
        self._quiet_until = 0  # the point from which units may freeze
        self._unfreezes = 0
        self._told = ""
        self._warned: set[str] = set()  # of the monitor: what is expected of it

    def _choose(self, progress: Progress, stats: FreezeStatistics) -> int:
        if progress.epoch <= self._point:
            return self._num_frozen
        self._point = progress.epoch
        before = self._best
        stale = self._is_stale(progress)
        if self._best != before:
            self._best_loss = None  # that of this point, if there is one
        loss, began, self._step = stats.loss, self._step, progress.step
        if loss is None or not math.isfinite(loss):
            if loss is not None and not self.is_replayed:
                _logger.warning(
                    "mean training loss at step %d: expected a finite number, got %s; "
                    "nothing freezes at this evaluation point",
                    progress.step,
                    loss,
                )
            self._told = "no training loss was measured"
            return self._num_frozen
        first = self._take_first(loss, began, progress)
        bar = self._stake * first
        alone, fell = self._helps_training_alone(loss), self._rate_fell(progress, began)
        if self._num_frozen > self.starting_units:
            if fell is not None and loss > _BACK_TO_STAKE * bar:
                self._told = fell
                self._thaw()
                return self._num_frozen
            if loss > self._returns_at:
                self._unfreeze(loss, first)
                return self._num_frozen
        self._told = self._tell_loss(loss, first)
        if self._monitor is not None:
            self._told += self._tell_monitor(progress, alone=alone)
        size = loss if loss > 0 else max(abs(first), abs(loss))
        returns_at = loss + _BACK_BY * size
        if loss > 0:
            returns_at = max(returns_at, _BACK_TO_STAKE * bar)
        if self._returns_at != _BACK_TO_STAKE * bar:  # the monitor allowed the freeze
            self._returns_at = min(self._returns_at, returns_at)
        little = 0.0 <= loss <= bar  # of a loss below 0 nobody knows how far it falls
        if not little and not (stale and alone):
            return self._num_frozen
        held = self._held_by(progress)
        if held is not None:
            self._told += f"; {held}"
            return self._num_frozen
        self._freeze(_BACK_TO_STAKE * bar if little else returns_at)
        return self._num_frozen

    def _helps_training_alone(self, loss: float) -> bool:
        """Tell whether the training loss has fallen since the monitor improved.

        A monitor may stand still because nothing is learned yet, or at this rate.
        """
        if self._best_loss is None:
            self._best_loss = loss
        return self._best_loss - loss >= _FALLS_BY * abs(self._best_loss)

    def _rate_fell(self, progress: Progress, began: int) -> str | None:
        """Say by how much the learning rate has fallen, if that tells something.

        At a lower one a monitor that stood still may improve again. Not at the end,
        where schedules go to 0.
        """
        rate, before = progress.learning_rate, self._rate
        self._rate = rate or 0.0
        if rate is None or not 0.0 < rate * _RATE_FALLS <= before * (1 + 1e-9):
            return None
        total, steps = progress.total_steps, progress.step - began
        if total is not None and total - progress.step < _LEAST_LEFT * steps:
            return None
        return f"the learning rate fell from {before:.3g} to {rate:.3g}"

    def _why(self) -> str:
        return self._told

    def _tell_loss(self, loss: float, first: float) -> str:
        for value, what in ((loss, "training loss"), (first, "first mean loss")):
            if value < 0:
                return f"the {what} is {value:.3g}: below 0 it decides nothing"
        return (
            f"the training loss is {_percent(loss, first)} of its first mean, "
            f"{100 * self._stake:g} % or less freezes"
        )

    def _take_first(self, loss: float, began: int, progress: Progress) -> float:
        """Return the first mean, with the interval's loss if it belongs to that."""
        total = progress.total_steps
        early = total is not None and began < _WARM_UP * total
        if self._first is None or (early and not self._unfreezes):
            steps = max(1, progress.step - began)
            mean = loss if self._first is None else self._first
            self._first_steps += steps
            self._first = mean + (loss - mean) * steps / self._first_steps
        return self._first

    def _freeze(self, returns_at: float) -> None:
        most = max(self.starting_units, self.num_units - self._kept())
        active = self.num_units - self._num_frozen
        wanted = math.ceil(self._num_frozen + self._alpha * active - 1e-9)
        if self._num_frozen == self.starting_units:
            self._returns_at = returns_at
        self._num_frozen = max(self._num_frozen, min(wanted, most))

    def _unfreeze(self, loss: float, first: float) -> None:
        self._told = (
            f"the training loss came back to {loss:.3g}, above the "
            f"{self._returns_at:.3g} that were allowed"
        )
        self._thaw()
        self._first = max(first, min(loss, _MOST_COMES_BACK * first))
        self._unfreezes += 1
        self._quiet_until = self._point + 1 + _COOL_DOWN

    def _thaw(self) -> None:
        self._num_frozen = self.starting_units
        self._best, self._best_loss, self._stale = None, None, 0
        self._moved = False

    def _held_by(self, progress: Progress) -> str | None:
        """Return what forbids a freeze now, if anything does."""
        total = progress.total_steps
        if total is not None and progress.step < _WARM_UP * total:
            return f"nothing freezes before step {math.ceil(_WARM_UP * total)}"
        if self._unfreezes >= _MOST_UNFREEZES:
            return f"nothing freezes after {self._unfreezes} unfreezes"
        if self._point < self._quiet_until:
            return f"nothing freezes before point {self._quiet_until}"
        return None

    def _kept(self) -> int:
        wanted = self._min_active
        return max(1, self.num_units // 8) if wanted is None else wanted

    # -- the monitor -----------------------------------------------------------

    def _is_stale(self, progress: Progress) -> bool:
        """Take in the monitor; tell whether it has stopped improving.

        Where nobody counts evaluations, a value that is exactly the last one was not
        evaluated anew.
        """
        if self._monitor is None:
            return False
        name, better = self._monitor
        value, count = progress.metrics.get(name), progress.evaluations.get(name)
        anew = value != self._last if count is None else count != self._evaluations
        self._evaluations = count or 0
        if value is None or not math.isfinite(value) or not anew:
            return self._stale >= self._patience
        self._last = value
        best = value if self._best is None else self._best
        improved = value < best if better == "min" else value > best
        if self._best is None or improved:
            self._best, self._stale, self._moved = value, 0, improved
        elif value != best or self._moved:
            self._stale += 1
        return self._stale >= self._patience

    def _tell_monitor(self, progress: Progress, *, alone: bool) -> str:
        if self._monitor is None:
            return ""
        name, known = self._monitor[0], sorted(progress.metrics)
        if name not in known:
            self._warn_once(
                f"a metric of engine.evaluate ({', '.join(known)})", f"{name!r}", known
            )
            return "; the monitor was not evaluated"
        if not math.isfinite(progress.metrics[name]):
            self._warn_once("finite values", f"{name}={progress.metrics[name]}", known)
            return f"; {name} is no finite number, which counts for nothing"
        if self._stale == 0:
            return f"; {name} improved in its last evaluation, or has not moved yet"
        text = (
            f"; evaluations since {name} improved: {self._stale}, which freezes at "
            f"{self._patience}"
        )
        if self._stale >= self._patience and not alone:
            text += (
                f", once the training loss has fallen by {100 * _FALLS_BY:g} % since"
            )
        return text

    def _warn_once(self, expected: str, got: str, known: Sequence[str]) -> None:
        if known and expected not in self._warned and not self.is_replayed:
            self._warned.add(expected)
            _logger.warning(
                "Guarded monitor: expected %s, got %s; the training loss alone decides",
                expected,
                got,
            )

    # -- state -----------------------------------------------------------------

    def load_state_dict(self, state: State) -> None:
        """See ``Policy``; states of older versions lack entries."""
        added: State = {"evaluations": 0, "best_loss": [], "moved": 1, "rate": 0.0}
        super().load_state_dict({**added, **state} if "last" in state else state)

    def _begin(self) -> None:
        self._num_frozen = self.starting_units

    def _check_units(self, num_units: int) -> None:
        if self._min_active is not None:
            check_count("min_active", self._min_active, num_units)

    def _get_settings(self) -> dict[str, object]:
        return {
            "alpha": self._alpha,
            "stake": self._stake,
            "monitor": self._monitor,
            "patience": self._patience,
            "min_active": self._min_active,
        }

    def _get_state(self) -> State:
        return {
            "point": self._point,
            "num_frozen": self._num_frozen,
            "first": [] if self._first is None else [self._first],
            "first_steps": self._first_steps,
            "step": self._step,
            "returns_at": self._returns_at,
            "best": [] if self._best is None else [self._best],
            "last": [] if self._last is None else [self._last],
            "evaluations": self._evaluations,
            "best_loss": [] if self._best_loss is None else [self._best_loss],
            "moved": int(self._moved),
            "stale": self._stale,
            "rate": self._rate,
            "quiet_until": self._quiet_until,
            "unfreezes": self._unfreezes,
        }

    def _set_state(self, state: State) -> None:
        def count(name: str, limit: int | None = None) -> int:
            return check_count(f"policy state {name}", state[name], limit)

        returns_at, rate = _number(state, "returns_at"), _number(state, "rate")
        names = ("first", "best", "last", "best_loss")
        first, best, last, best_loss = (_optional(state, name) for name in names)
        num_frozen = count("num_frozen", self.num_units)
        self._point, self._stale = count("point"), count("stale")
        self._evaluations = count("evaluations")
        self._first_steps, self._step = count("first_steps"), count("step")
        self._quiet_until, self._unfreezes = count("quiet_until"), count("unfreezes")
        self._num_frozen = num_frozen
        self._first, self._returns_at = first, returns_at
        self._best, self._last, self._best_loss = best, last, best_loss
        self._moved = bool(count("moved", 1))
        self._rate = rate


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole > 0 else "0 %"


def _checked_monitor(monitor: Monitor | None) -> Monitor | None:
    if monitor is None:
        return None
    fits = (
        isinstance(monitor, tuple)
        and len(monitor) == 2
        and isinstance(monitor[0], str)
        and monitor[1] in ("min", "max")
    )
    if not fits:
        raise ValueError(
            "monitor: expected a metric's name with 'min' or 'max', such as "
            f"('accuracy', 'max'), got {monitor!r}"
        )
    return monitor


def _number(state: State, name: str) -> float:
    value = state[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"policy state {name}: expected a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"policy state {name}: expected a finite number, got {value}")
    return float(value)


def _optional(state: State, name: str) -> float | None:
    value = state[name]
    if not isinstance(value, list) or len(value) > 1:
        raise TypeError(
            f"policy state {name}: expected a list of at most one number, got {value!r}"
        )
    return _number({name: value[0]}, name) if value else None
