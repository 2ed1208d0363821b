"""The rooms of the package, floor by floor, and who uses whom.

An arrow that follows from others is left out: where a room uses a second one, and that
one a third, the first may use the third as well if the table says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from _svg import block, path, picture, text
from check_layers import ARROWS

Graph = dict[str, set[str]]
WIDTH, FLOOR, BOX_HEIGHT, MARGIN = 960, 62, 26, 16
LETTER, PADDING = 7.4, 20  # pixels of a letter; of a box alongside its name
SWEEPS = 12


def draw(arrows: Mapping[str, frozenset[str]] = ARROWS) -> str:
    """The whole picture."""
    graph = {room: set(uses) & set(arrows) for room, uses in arrows.items()}
    shown = reduced(graph)
    floors, chains = routed(shown, floors_of(graph))
    ordered = arranged(floors, chains)
    places = placed(ordered)
    parts = [_line(chain, places) for chain in chains]
    for room, (x, y) in sorted(places.items()):
        if room in graph:
            width = _width(room)
            uses = ", ".join(sorted(graph[room])) or "no other room"
            tip = f"{room} may use {uses}"
            parts += [
                block(x - width / 2, y, width, BOX_HEIGHT, "box", tip=tip),
                text(x, y + BOX_HEIGHT / 2 + 4, room, anchor="middle"),
            ]
    height = len(ordered) * FLOOR + MARGIN
    title = "rooms and who uses whom, top to bottom; arrows that follow are left out"
    return picture(WIDTH, height, title, parts)


def reduced(graph: Mapping[str, set[str]]) -> Graph:
    """The arrows that do not follow from others."""
    return {
        room: {
            target
            for target in uses
            if not any(target in reach(graph, other) for other in uses - {target})
        }
        for room, uses in graph.items()
    }


def reach(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """What a room uses, directly or not."""
    found: set[str] = set()
    pending = [start]
    while pending:
        new = graph[pending.pop()] - found
        found |= new
        pending += new
    return found


def floors_of(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Each room's floor, 0 at the bottom: one above the highest that it uses."""
    floors: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in floors:
            floors[room] = 1 + max(map(floor, graph[room]), default=-1)
        return floors[room]

    for room in graph:
        floor(room)
    return floors


def routed(
    graph: Graph, floors: Mapping[str, int]
) -> tuple[list[list[str]], list[list[str]]]:
    """Rooms by floor from the top, and each arrow as the places that it passes.

    Where an arrow crosses a floor it has a place of its own there, `a>b:n`.
    """
    rows: list[list[str]] = [[] for _ in range(max(floors.values()) + 1)]
    for room in sorted(graph):
        rows[floors[room]].append(room)
    chains = []
    for room in sorted(graph):
        for target in sorted(graph[room]):
            passes = [
                f"{room}>{target}:{floor}"
                for floor in range(floors[room] - 1, floors[target], -1)
            ]
            for name in passes:
                rows[int(name.rpartition(":")[2])].append(name)
            chains.append([room, *passes, target])
    return rows[::-1], chains


def arranged(
    floors: Sequence[Sequence[str]], chains: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Each floor ordered by where its neighbours are, so that few arrows cross."""
    near: dict[str, list[str]] = {name: [] for floor in floors for name in floor}
    for chain in chains:
        for one, other in itertools.pairwise(chain):
            near[one].append(other)
            near[other].append(one)
    ordered = [list(floor) for floor in floors]
    for sweep in range(SWEEPS):
        places = placed(ordered)
        indices = range(len(ordered))
        for index in indices if sweep % 2 else reversed(indices):
            alongside = index - 1 if sweep % 2 else index + 1
            if not 0 <= alongside < len(ordered):
                continue
            there = set(ordered[alongside])

            def middle(
                name: str,
                there: set[str] = there,
                places: Mapping[str, tuple[float, float]] = places,
            ) -> float:
                found = [places[other][0] for other in near[name] if other in there]
                return sum(found) / len(found) if found else places[name][0]

            ordered[index] = sorted(ordered[index], key=lambda n: (middle(n), n))
            places = placed(ordered)
    return ordered


def placed(floors: Sequence[Sequence[str]]) -> dict[str, tuple[float, float]]:
    """The middle of each name's upper side, in pixels."""
    places = {}
    for row, names in enumerate(floors):
        widths = [_width(name) for name in names]
        free = (WIDTH - sum(widths)) / (len(names) + 1)
        x = 0.0
        for name, width in zip(names, widths, strict=True):
            x += free + width / 2
            places[name] = round(x, 1), float(row * FLOOR + MARGIN)
            x += width / 2
    return places


def _width(name: str) -> float:
    return 0.0 if ">" in name else round(LETTER * len(name) + PADDING, 1)


def _line(chain: Sequence[str], places: Mapping[str, tuple[float, float]]) -> str:
    """An arrow through its places; it ends in a head."""
    x, y = places[chain[0]]
    steps = [f"M {x:g} {y + BOX_HEIGHT:g}"]
    y += BOX_HEIGHT
    for name in chain[1:]:
        to_x, to_y = places[name]
        bend = (y + to_y) / 2
        steps.append(f"C {x:g} {bend:g} {to_x:g} {bend:g} {to_x:g} {to_y:g}")
        x, y = to_x, to_y
        if ">" in name:
            steps.append(f"v {BOX_HEIGHT:g}")
            y += BOX_HEIGHT
    steps.append("m -3 -5 l 3 5 l 3 -5")
    return path(" ".join(steps))
