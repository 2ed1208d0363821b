"""The ladder's rows: configurations in order, and what each was expected to give.

The expected figures were worked out beforehand with a model of their own, whose rates
are not recorded. docs/paper-ladder.md says where each row's configuration was read from
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from simulated.ladder_instance import Instance
from simulated.ladder_steps import Rung

STATIC = Rung(name="static K=8, paper's M", freezes=False, lengths="static")
STATIC_BEST_M = replace(STATIC, name="static K=8, best M", best_m=True)
FREEZE_ONLY = Rung(
    name="freezing only, frozen layers left in their stages",
    lengths="static",
    prefix="stages",
)
PAPER = Rung(name="paper: K halves, serial prefix, batch grows", batch_grows=True)
PAPER_CACHED = Rung(name="paper with cache, constant global batch", cached=True)
PAPER_GROWS = replace(
    PAPER_CACHED, name="paper with cache, batch grows", batch_grows=True
)
BEST_M = replace(PAPER_CACHED, name="+ best M, constant global batch", best_m=True)
SPREAD = replace(BEST_M, name="+ prefix spread over the K devices", prefix="spread")
ANY_K = replace(SPREAD, name="+ any K", lengths="any")
ONE_F_ONE_B = replace(
    ANY_K,
    name="+ 1F1B, no input gradient at the first active layer",
    schedules=("1f1b",),
    drops_input_grad=True,
)
FILLED = replace(ONE_F_ONE_B, name="+ bubble filling", prefix="filled")
UNCACHED = replace(ONE_F_ONE_B, name="the same without cache, spread", cached=False)
UNCACHED_FILLED = replace(FILLED, name="the same without cache, filled", cached=False)
OURS = replace(
    FILLED,
    name="ours: schedule by time (GPipe, 1F1B, ZB-H1)",
    schedules=("gpipe", "1f1b", "zb-h1"),
)
BEST_STATIC = replace(
    OURS, name="best static plan", freezes=False, prefix="spread", cached=False
)
FULL = replace(OURS, name="full")


@dataclass(frozen=True)
class Line:
    """A row: what is run, what was expected of it, and what the paper measured."""

    rung: Rung
    expected: float | None
    paper: float | None = None


@dataclass(frozen=True)
class Section:
    """Rows of one instance, each a speed-up over the same baseline."""

    title: str
    instance: Instance
    baseline: Rung
    lines: tuple[Line, ...]

    @property
    def rungs(self) -> list[Rung]:
        """The baseline and all others, each once."""
        return list(dict.fromkeys([self.baseline, *(e.rung for e in self.lines)]))

    def system(self, rung: Rung) -> str:
        """Name a rung among those of all sections."""
        return f"{self.title}: {rung.name}"


MAIN = Section(
    "N=16",
    Instance(),
    STATIC,
    (
        Line(STATIC, 1.00, 1.00),
        Line(STATIC_BEST_M, 1.15),
        Line(FREEZE_ONLY, 1.48, 0.95),
        Line(PAPER, 1.88, 2.27),
        Line(PAPER_CACHED, 2.77),
        Line(PAPER_GROWS, 2.85, 2.83),
        Line(BEST_M, 2.98),
        Line(SPREAD, 3.74),
        Line(ANY_K, 3.80),
        Line(ONE_F_ONE_B, 3.78),
        Line(FILLED, 4.05),
        Line(UNCACHED, 2.52),
        Line(UNCACHED_FILLED, 2.68),
        Line(OURS, None),
    ),
)
LARGER = Section(
    "N=64", Instance(num_nodes=8, global_batch=3200), STATIC, (Line(FILLED, 3.92),)
)
ROOMY = Instance(memory_limited=False)
FITS_ONE = Section(
    "K0=1 over static K=8 with best M",
    ROOMY,
    STATIC_BEST_M,
    (Line(BEST_STATIC, 1.40), Line(FULL, 4.4)),
)
OVER_BEST = Section("K0=1 over best static", ROOMY, BEST_STATIC, (Line(FULL, 3.1),))


def _other(title: str, instance: Instance, expected: tuple[float, ...]) -> Section:
    rungs = (PAPER_CACHED, ONE_F_ONE_B, FILLED)
    lines = tuple(Line(*each) for each in zip(rungs, expected, strict=True))
    return Section(
        f"{title} over static K=8 with best M", instance, STATIC_BEST_M, lines
    )


SECTIONS = (
    MAIN,
    LARGER,
    FITS_ONE,
    OVER_BEST,
    _other("L=24", Instance(num_blocks=24), (2.4, 3.15, 3.38)),
    _other("L=48", Instance(num_blocks=48), (2.4, 3.15, 3.38)),
    _other("alpha=1/5", Instance(alpha=Fraction(1, 5)), (1.74, 2.1, 2.24)),
)
