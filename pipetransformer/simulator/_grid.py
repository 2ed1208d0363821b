"""A simulated step as text."""

from __future__ import annotations

from collections.abc import Sequence

from pipetransformer.simulator.event import Event

_LEGEND = (
    "F forward, R forward again, B backward, I input gradients, W weight gradients, "
    "P frozen layers, O optimizer, A all-reduce, H cache read, . standing still"
)


def draw(events: Sequence[Event], title: str, step_ns: int, width: int) -> str:
    """Return a heading, a line per stage and one each for the network and the cache.

    Raises:
        ValueError: a width below 10.
    """
    if width < 10:
        raise ValueError(f"width: expected at least 10 columns, got {width}")
    lines = [
        f"simulated: {title}, {step_ns:,} ns a step, a column is "
        f"{step_ns / width:,.6g} ns"
    ]
    stages = 1 + max((event.stage for event in events), default=0)
    for stage in range(stages):
        mine = [e for e in events if e.stage == stage and e.resource == "compute"]
        lines.append(f"stage {stage:<7}" + _line(mine, step_ns, width))
    for label in ("device link", "network", "cache"):
        mine = [e for e in events if e.resource == label and e.end_ns > e.begin_ns]
        if mine:
            lines.append(f"{label:<13}" + _line(mine, step_ns, width).rstrip("."))
    shown = {event.kind for event in events}
    legend = [part for part in _LEGEND.split(", ") if part[0] in {*shown, "."}]
    return "\n".join([*lines, ", ".join(legend)])


def _line(events: Sequence[Event], step_ns: int, width: int) -> str:
    columns = ["."] * width
    for event in events:
        if event.end_ns == event.begin_ns:
            continue
        begin = min(event.begin_ns * width // step_ns, width - 1)
        end = max(begin + 1, event.end_ns * width // step_ns)
        name = f"A{event.stage}" if event.kind == "A" else event.name
        columns[begin:end] = name.ljust(end - begin, "-")[: end - begin]
    return "".join(columns)
