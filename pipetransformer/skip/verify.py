"""Checks that what is stashed and what is popped fit together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pipetransformer.skip.namespace import Namespace
from pipetransformer.skip.wrapper import Skippable

Key = tuple["Namespace | None", str]


def verify_skippables(module: nn.Sequential) -> None:
    """Raise unless every stash has one pop behind it and every pop a stash before.

    Layers inside inner Sequentials count in their order. Inside any other module the
    order of calls is not known, so a pair within it is taken to fit, also where another
    such module has a pair of the same name.

    Args:
        module: The layers.

    Raises:
        TypeError: one that lists all the findings; layers go by their child names,
            inner ones by dotted names.
    """
    findings: list[str] = []
    stashed: set[Key] = set()
    popped: set[Key] = set()
    within: dict[Key, str] = {}
    for label, skippables in _units(module):
        pairs = _pairs(skippables)
        within.update(dict.fromkeys(pairs, label))
        to_pop: list[tuple[Skippable, Key]] = []
        for skippable in skippables:
            both = set(skippable.stashable()) & set(skippable.poppable())
            for key in skippable.stashable():
                if key in pairs:
                    continue
                if key in both:
                    findings.append(
                        f"{label!r} declared {key[1]!r} both as stashable and as "
                        "poppable"
                    )
                elif key in stashed:
                    findings.append(f"{label!r} redeclared {key[1]!r} as stashable")
                stashed.add(key)
            to_pop += [
                (skippable, key)
                for key in skippable.poppable()
                if key not in both and key not in pairs
            ]
            popped |= both
        for _, key in to_pop:
            if key in popped:
                findings.append(f"{label!r} redeclared {key[1]!r} as poppable")
            elif key not in stashed:
                findings.append(
                    f"{label!r} declared {key[1]!r} as poppable but it was not stashed"
                )
            popped.add(key)
    for key, label in within.items():
        if key in stashed | popped:
            findings.append(f"{label!r} has a pair {key[1]!r} that others declare, too")
    for _, name in sorted(stashed - popped):
        findings.append(f"no module declared {name!r} as poppable but stashed")
    if findings:
        raise TypeError(
            "skips: expected each name stashed once and popped once behind it, got:\n"
            + "\n".join(f"* {finding}" for finding in findings)
        )


def _pairs(skippables: list[Skippable]) -> set[Key]:
    """Return what one of these layers stashes, and another one pops."""
    stashed = [key for layer in skippables for key in layer.stashable()]
    popped = [key for layer in skippables for key in layer.poppable()]
    own = {
        key
        for layer in skippables
        for key in set(layer.stashable()) & set(layer.poppable())
    }
    once = {key for key in stashed if stashed.count(key) == popped.count(key) == 1}
    return once - own


def _units(module: nn.Module, label: str = "") -> Iterator[tuple[str, list[Skippable]]]:
    """Innermost layers of nested Sequentials, each with the skippables in it."""
    if isinstance(module, nn.Sequential):
        for name, child in module.named_children():
            yield from _units(child, f"{label}.{name}" if label else name)
    else:
        yield label, [part for part in module.modules() if isinstance(part, Skippable)]
