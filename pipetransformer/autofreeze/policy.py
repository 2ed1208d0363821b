"""What a freeze policy is: one question, answered at evaluation points."""

from __future__ import annotations

import abc
import copy
import dataclasses
import logging
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

_logger = logging.getLogger(__name__)

State = dict[str, int | float | list[float]]
"""A policy's state: plain numbers that survive JSON and travel in a plan."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where training stands at an evaluation point.

    Attributes:
        epoch: index of the evaluation point from 0; point 0 is before training. One
            comes with every epoch, or with every ``Config.freeze_every`` steps.
        step: optimizer steps taken.
        total_steps: optimizer steps of the whole run, if known.
        learning_rate: of the optimizer's first group, if there is one.
        metrics: last values by name.
        evaluations: how many evaluations have had a metric, by its name. It tells a
            value that was found again from one that was not evaluated anew.
    """

    epoch: int
    step: int
    total_steps: int | None = None
    learning_rate: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    evaluations: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the counts."""
        for name in ("epoch", "step"):
            check_count(name, getattr(self, name))


@dataclasses.dataclass(frozen=True)
class FreezeStatistics:
    """What the interval since the last evaluation point measured.

    What a policy does not name in ``needs`` is None, as what could not be measured.
    Values of frozen units are 0.0; policies do not read them.

    Attributes:
        gradient_norms: per unit, the L2 norm of the gradient summed over the interval.
            An active unit in which nothing trains, such as an activation, has that of
            the active unit before it that trains, or of the first one behind it.
        gradient_l1: per unit, the sum over its parameters of the L1 norm of the
            gradient summed over the interval; of others as above.
        loss: the mean training loss, weighted as the loss itself is, over the rows of
            all replicas; after the loss of a rank over those that are known.
        plasticity: per unit, how far a fixed batch's similarities by its outputs have
            come since the point before, see `Plasticity`; the mean over the
            replicas that know it.
    """

    gradient_norms: tuple[float, ...] | None = None
    gradient_l1: tuple[float, ...] | None = None
    loss: float | None = None
    plasticity: tuple[float, ...] | None = None

    @property
    def measured(self) -> dict[str, float | list[float]]:
        """What was measured, by name, as plain values."""
        values = {name: getattr(self, name) for name in STATISTICS}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }


STATISTICS = tuple(field.name for field in dataclasses.fields(FreezeStatistics))


class ProgressEntry(TypedDict):
    """The fields of ``Progress`` as they stand in a log."""

    epoch: int
    step: int
    total_steps: int | None
    learning_rate: float | None
    metrics: dict[str, float]
    evaluations: dict[str, int]


class Decision(TypedDict):
    """One entry of a policy's log: a decision with all of its inputs."""

    num_units: int
    starting_units: int
    state: State
    progress: ProgressEntry
    statistics: dict[str, float | list[float]]
    wanted: int
    decision: int
    why: str


def told(decision: Decision) -> str:
    """Return a decision as a sentence: point, step, units, and what decided."""
    at = decision["progress"]
    why = f": {decision['why']}" if decision["why"] else ""
    frozen = f"{decision['decision']} of {decision['num_units']} units frozen"
    if decision["decision"] != decision["wanted"]:
        frozen += f" ({decision['wanted']} wanted)"
    return f"point {at['epoch']}, step {at['step']}: {frozen}{why}"


def check_count(what: str, value: object, limit: int | None = None) -> int:
    """Return `value`, a count in [0, limit].

    Raises:
        TypeError: if it is no int.
        ValueError: if it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what}: expected an int, got {value!r}")
    if value < 0 or (limit is not None and value > limit):
        wanted = "a count >= 0" if limit is None else f"a count in [0, {limit}]"
        raise ValueError(f"{what}: expected {wanted}, got {value}")
    return value


class Policy(abc.ABC):
    """Names the number of front units that are frozen from here on.

    A policy is a pure function of its state, the statistics and the progress: no
    tensors, no ranks, no clock, so every active rank decides identically. A subclass
    writes ``_choose``; if it has settings, ``_get_settings``; and if it remembers
    anything, ``_get_state`` and ``_set_state``. ``_why`` says what decided.

    Attributes:
        needs: names of the fields of ``FreezeStatistics`` that ``observe`` is to be
            given; measuring gradients costs a copy of those of the active layers.
        dry_run: log what would be frozen, freeze nothing.
        log: one dict per decision with all of its inputs; see ``replay``.
        is_replayed: a decision is taken again, so what it warned of is known.
    """

    needs: frozenset[str] = frozenset()
    is_replayed = False

    def __init__(self, *, dry_run: bool = False) -> None:
        self.dry_run = dry_run
        self.log: list[Decision] = []
        self._num_units: int | None = None
        self._starting_units = 0
        self._statistics = FreezeStatistics()

    def __repr__(self) -> str:
        """The call that makes this policy; ranks compare it to find other settings."""
        settings = {**self._get_settings(), "dry_run": self.dry_run}
        arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"{type(self).__name__}({arguments})"

    @property
    def num_units(self) -> int:
        """Number of units of the model this policy is bound to.

        Raises:
            ValueError: before ``bind``.
        """
        if self._num_units is None:
            raise ValueError("policy: expected bind(num_units) first, got no units")
        return self._num_units

    @property
    def starting_units(self) -> int:
        """Front units that are frozen from the start; no decision goes below it."""
        return self._starting_units

    def bind(self, num_units: int, *, starting_units: int = 0) -> None:
        """Tell the policy how many units the model has.

        Args:
            num_units: units of the model.
            starting_units: of them those before the first trainable parameter.

        Raises:
            ValueError: if the policy's settings do not fit that number, if it needs
                statistics that there are none of, or if it is bound already: it
                remembers the run it decided for.
        """
        check_count("num_units", num_units)
        if not hasattr(self, "_num_units"):
            raise TypeError(
                f"policy: expected {type(self).__name__}.__init__ to call "
                "super().__init__() first, which it does not"
            )
        if self._num_units is not None:
            raise ValueError(
                "policy: expected a new one for each engine, got one that is bound to "
                f"{self._num_units} units"
            )
        check_count("starting_units", starting_units, num_units)
        needs: Any = self.needs
        if not isinstance(needs, Collection) or isinstance(needs, str):
            raise ValueError(
                f"policy needs: expected a set of {list(STATISTICS)}, got {needs!r}"
            )
        unknown = [name for name in needs if name not in STATISTICS]
        if unknown:
            raise ValueError(
                f"policy needs: expected a set of {list(STATISTICS)}, got {unknown}"
            )
        self.needs = frozenset(self.needs)
        self._check_units(num_units)
        self._num_units, self._starting_units = num_units, starting_units
        self._begin()

    def observe(self, stats: FreezeStatistics) -> None:
        """Hand over the statistics for the next ``decide``, which uses them up.

        Raises:
            ValueError: if they do not hold one value per unit.
        """
        for name in ("gradient_norms", "gradient_l1", "plasticity"):
            values = getattr(stats, name)
            if values is not None and len(values) != self.num_units:
                raise ValueError(
                    f"{name}: expected {self.num_units} values, one per unit, "
                    f"got {len(values)}"
                )
        self._statistics = stats

    def decide(self, progress: Progress) -> int:
        """Number of front units frozen from this evaluation point on.

        At least ``starting_units``, whatever the policy wants.

        A statistic that is not finite never freezes: the decision then repeats the
        last one, with a warning that names the step and the unit.

        Raises:
            TypeError: what the policy chose is no int.
            ValueError: it is no number of units that there are.
        """
        stats, self._statistics = self._statistics, FreezeStatistics()
        state = self.state_dict()
        floor = self._starting_units
        chosen = self._choose(progress, stats)
        what = f"{type(self).__name__}, units to freeze at point {progress.epoch}"
        if not isinstance(chosen, bool) and hasattr(chosen, "__index__"):
            chosen = operator.index(chosen)  # numpy's integers, too
        wanted = max(floor, check_count(what, chosen, self.num_units))
        decision = floor if self.dry_run else wanted
        if self.dry_run:
            _logger.info(
                "dry run at step %d: would freeze %d of %d units",
                progress.step,
                wanted,
                self.num_units,
            )
        self.log.append(
            Decision(
                num_units=self.num_units,
                starting_units=floor,
                state=state,
                progress=_to_entry(progress),
                statistics=stats.measured,
                wanted=wanted,
                decision=decision,
                why=self._why(),
            )
        )
        return decision

    def next_change(self, progress: Progress) -> int | None:
        """Name the next evaluation point at which the answer will be another one.

        What a shorter pipeline gains lasts until then, so it is what a change of plan
        is priced by. It is asked after ``decide`` at the same point, and changes
        nothing.

        Returns:
            The index of the point, above ``progress.epoch``; None if the policy does
            not know it, or if there is none.
        """
        return None if self.dry_run else self._find_change(progress)

    def foresee(
        self, progress: Progress, points: int, *, steps: int = 0
    ) -> list[int] | None:
        """Return what the next decisions will be; changes nothing, as a copy is asked.

        Args:
            progress: At the last point that was decided; metrics are taken to stay.
            points: How many decisions.
            steps: Optimizer steps between two points.

        Returns:
            Units frozen from each point on; None for a policy that needs statistics,
            or that cannot be copied.
        """
        if self.needs:
            return None
        try:
            asked = copy.deepcopy(
                self, {id(self.log): list(self.log)}
            )  # its entries stay
        except Exception as error:  # whatever a user's policy holds
            _logger.info("%s: not foreseen, as it cannot be copied: %s", self, error)
            return None
        floor = self._starting_units
        wanted = [
            asked._choose(
                dataclasses.replace(
                    progress,
                    epoch=progress.epoch + n,
                    step=progress.step + n * steps,
                ),
                FreezeStatistics(),
            )
            for n in range(1, points + 1)
        ]
        return [floor if self.dry_run else max(floor, each) for each in wanted]

    def state_dict(self) -> State:
        """The state as plain values; statistics not yet used are not part of it.

        Raises:
            TypeError: ``_get_state`` gives something else than numbers, texts, and
                lists and dicts of such; numpy's numbers become Python's.
        """
        state: State = _plain(self._get_state(), f"{type(self).__name__} state")
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore what ``state_dict`` gave.

        Raises:
            ValueError: if it is the state of another policy or of another model.
        """
        expected = sorted(self._get_state())
        if sorted(state) != expected:
            raise ValueError(
                f"policy state: expected the entries {expected} of "
                f"{type(self).__name__}, got {sorted(state)}, of another policy "
                "or version"
            )
        self._set_state(state)

    def _all_finite(
        self,
        name: str,
        values: Sequence[float] | None,
        num_frozen: int,
        progress: Progress,
    ) -> bool:
        """Tell whether the active units' values are numbers; warn if they are not.

        Args:
            name: Of the statistic.
            values: One per unit.
            num_frozen: Front units whose values do not count.
            progress: Its step is named.

        Raises:
            ValueError: there are none.
        """
        if values is None:
            raise ValueError(
                f"{name}: expected {self.num_units} values, one per unit, got none"
            )
        unit = first_not_finite(values, num_frozen)
        if unit is not None and not self.is_replayed:
            _logger.warning(
                "%s of unit %d at step %d: expected a finite number, got %s; nothing "
                "freezes at this evaluation point",
                name,
                unit,
                progress.step,
                values[unit],
            )
        return unit is None

    @abc.abstractmethod
    def _choose(self, progress: Progress, stats: FreezeStatistics) -> int: ...

    def _find_change(self, progress: Progress) -> int | None:
        """See ``next_change``; a policy that cannot know answers None."""
        return None

    def _check_units(self, num_units: int) -> None:  # noqa: B027 (optional hook)
        """Raise ValueError if the settings do not fit `num_units`."""

    def _why(self) -> str:
        """What decided last, and what another decision would have taken; for people."""
        return ""

    def _begin(self) -> None:  # noqa: B027 (optional hook)
        """Set what the policy remembers at first, once its units are known."""

    def _get_settings(self) -> dict[str, object]:
        """Arguments of the constructor, without ``dry_run``."""
        return {}

    def _get_state(self) -> State:
        return {}

    def _set_state(self, state: State) -> None:  # noqa: B027 (optional hook)
        """Take over a state with the entries of ``_get_state``."""


def _plain(value: Any, what: str) -> Any:
    """Return a state that messages and logs can hold."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{what}: expected texts as keys, got {key!r}")
        return {key: _plain(each, f"{what}, {key}") for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each, what) for each in value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{what}: expected numbers, texts, and lists and dicts of such, got "
        f"{type(value).__name__}"
    )


def _to_entry(progress: Progress) -> ProgressEntry:
    return ProgressEntry(
        epoch=progress.epoch,
        step=progress.step,
        total_steps=progress.total_steps,
        learning_rate=progress.learning_rate,
        metrics=dict(progress.metrics),
        evaluations=dict(progress.evaluations),
    )


def _statistics_of(entry: Mapping[str, Any]) -> FreezeStatistics:
    norms = entry.get("gradient_norms")  # of older logs
    old = {} if norms is None else {"gradient_norms": norms}
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entry.get("statistics", old).items()
    }
    return FreezeStatistics(**given)


def first_not_finite(norms: Sequence[float], num_frozen: int) -> int | None:
    """Index of the first active unit whose norm is NaN or infinite, or None."""
    for unit in range(num_frozen, len(norms)):
        if not math.isfinite(norms[unit]):
            return unit
    return None


def replay(policy_factory: Callable[[], Policy], log: Sequence[Decision]) -> list[int]:
    """Take the decisions of a log again, each from the state it was taken in.

    Args:
        policy_factory: makes a policy with the settings of the one that wrote the log.
        log: ``policy.log``, or the same read back from JSON.

    Returns:
        The decisions, in order; equal to the ``"decision"`` entries of the log.
    """
    decisions = []
    for entry in log:
        policy = policy_factory()
        # Older logs know no starting units.
        starting = entry.get("starting_units", 0)
        policy.bind(entry["num_units"], starting_units=starting)
        policy.load_state_dict(entry["state"])
        policy.observe(_statistics_of(entry))
        policy.is_replayed = True
        decisions.append(policy.decide(Progress(**entry["progress"])))
    return decisions
