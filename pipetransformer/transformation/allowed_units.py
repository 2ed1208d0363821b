"""How far a freeze policy's answer can be followed: ties, and what is left to train."""

from __future__ import annotations

from pipetransformer.autofreeze import Never, boundary_of, movable_boundary
from pipetransformer.autofreeze.policy import Decision
from pipetransformer.run.context import Run


def allowed_units(run: Run, wanted: int) -> tuple[int, str | None]:
    """Return how many units may be frozen of those wanted, and what holds the rest."""
    model, ends = run.arguments.model, run.arguments.unit_ends
    units, held = movable_boundary(model, ends, wanted)
    while units > 0 and not _trainable_from(run, boundary_of(ends, units)):
        units -= 1
        held = "behind it nothing would be left to train"
    return units, held


def possible_boundaries(run: Run) -> set[int]:
    """Return where the frozen layers of the run may end."""
    ends, start = run.arguments.unit_ends, run.policy.starting_units
    most = start if isinstance(run.policy, Never) else len(ends)
    counts = {allowed_units(run, units)[0] for units in range(start, most + 1)}
    return {boundary_of(ends, units) for units in counts} - {0}


def _trainable_from(run: Run, boundary: int) -> bool:
    wanted = {id(p) for p in run.arguments.parameters}
    layers = list(run.arguments.model)[boundary:]
    return any(id(p) in wanted for layer in layers for p in layer.parameters())


def decisions_of(run: Run) -> list[Decision]:
    """Return what the policy has decided, with the units that froze and what held it.

    The policy's own log has its answers, by which they can be taken again.
    """
    found = []
    known = {
        wanted: allowed_units(run, wanted)
        for wanted in {entry["decision"] for entry in run.policy.log}
    }
    for entry in run.policy.log:
        units, held = known[entry["decision"]]
        why = "; ".join(text for text in (entry["why"], held) if text)
        found.append(Decision({**entry, "decision": units, "why": why}))
    return found
