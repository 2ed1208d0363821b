"""A run as a timeline: the slots and what they run, and the layers that are frozen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from _svg import block, path, picture, text

Content = dict[str, Any]
WIDTH, LEFT, RIGHT = 960, 74, 12
TOP, ROW, GAP = 58, 34, 5
LAYERS_TOP, LAYERS_HEIGHT = 56, 120  # below the rows; all layers
NARROWEST = 44  # of a block with a label, in pixels


def draw(run: Content) -> str:
    """The whole picture."""
    first, last = run["epochs"][0], run["epochs"][-1]
    shapes = [
        f"K={shape[0]} R={shape[1]}" for shape, _ in itertools.groupby(_shapes(run))
    ]
    title = (
        f"{run['world_size']} slots, {', then '.join(shapes)}; frozen layers grow from "
        f"{first['boundary']} to {last['boundary']} of {run['num_layers']}"
    )
    rows = run["world_size"] * (ROW + GAP)
    height = TOP + rows + LAYERS_TOP + LAYERS_HEIGHT + 64
    parts = [*_headings(run), *_slots(run), *_layers(run, TOP + rows + LAYERS_TOP)]
    return picture(WIDTH, height, title, [*parts, *_origin(run, height - 10)])


def _shapes(run: Content) -> list[tuple[int, int]]:
    return [(each["num_stages"], each["num_replicas"]) for each in run["epochs"]]


def _place(run: Content, seconds: float) -> float:
    total: float = run["total_seconds"]
    return LEFT + (WIDTH - LEFT - RIGHT) * seconds / total


def _span(run: Content, epoch: Content) -> tuple[float, float]:
    """Where an epoch's pass begins and ends, in pixels."""
    end = epoch["elapsed_seconds"]
    begin = _place(run, end - epoch["seconds"])
    return round(begin, 1), round(_place(run, end), 1)


def _headings(run: Content) -> Iterator[str]:
    """Each shape above its first pass, and below it the pause that came before."""
    pauses = {each["epoch"]: each["seconds"] for each in run["pauses"]}
    below = TOP + run["world_size"] * (ROW + GAP) + 11
    for shape, group in itertools.groupby(run["epochs"], _shape_of):
        epoch = next(group)
        x, _ = _span(run, epoch)
        stages = "stage" if shape[0] == 1 else "stages"
        replicas = "replica" if shape[1] == 1 else "replicas"
        shown = f"{shape[0]} {stages}, {shape[1]} {replicas}"
        yield text(x, 22, f"K={shape[0]}  R={shape[1]}")
        yield text(x, 40, shown, style="quiet")
        if (pause := pauses.get(epoch["epoch"])) is not None:
            yield text(x, below, f"pause {1000 * pause:.0f} ms", style="quiet")


def _shape_of(epoch: Content) -> tuple[int, int]:
    return epoch["num_stages"], epoch["num_replicas"]


def _slots(run: Content) -> Iterator[str]:
    """A row per slot, a block per pass; colours are replicas."""
    for slot in range(run["world_size"]):
        y = TOP + slot * (ROW + GAP)
        yield text(LEFT - 10, y + ROW / 2 + 4, f"slot {slot}", anchor="end")
        for epoch in run["epochs"]:
            replica, stage = divmod(slot, epoch["num_stages"])
            if replica >= epoch["num_replicas"]:
                continue
            begin, end = _span(run, epoch)
            width = round(end - begin, 1)
            tip = f"epoch {epoch['epoch']}: replica {replica}, stage {stage}"
            yield block(begin, y, width, ROW, f"r{replica % 4}", tip=tip)
            label = (
                f"stage {stage}" if epoch["num_stages"] > 1 else f"replica {replica}"
            )
            if width >= NARROWEST * len(label) / 7:
                yield text(begin + width / 2, y + ROW / 2 + 4, label, anchor="middle")


def _layers(run: Content, top: float) -> Iterator[str]:
    """The frozen part of the model, pass by pass."""
    unit = LAYERS_HEIGHT / run["num_layers"]
    bottom = top + LAYERS_HEIGHT
    grows = "layers of the model: the frozen part grows from below"
    yield text(LEFT, top - 10, grows, style="quiet")
    yield text(LEFT - 10, top + 10, f"{run['num_layers']}", anchor="end")
    yield text(LEFT - 10, bottom, "0", anchor="end")
    for epoch in run["epochs"]:
        begin, end = _span(run, epoch)
        width, frozen = round(end - begin, 1), round(unit * epoch["boundary"], 1)
        tip = f"epoch {epoch['epoch']}: {epoch['boundary']} layers frozen"
        if frozen:
            yield block(begin, bottom - frozen, width, frozen, "frozen", tip=tip)
        yield block(
            begin, top, width, round(LAYERS_HEIGHT - frozen, 1), "trained", tip=tip
        )
    axis = bottom + 8
    yield path(f"M {LEFT} {axis:g} H {WIDTH - RIGHT}")
    step = max(1, round(run["total_seconds"] / 8))
    for second in range(0, int(run["total_seconds"]) + 1, step):
        x = round(_place(run, second), 1)
        yield path(f"M {x:g} {axis:g} v 5")
        yield text(x, axis + 19, f"{second} s", style="quiet", anchor="middle")


def _origin(run: Content, y: float) -> Iterator[str]:
    where = run["machine"]
    yield text(
        LEFT,
        y,
        f"`{run['command']}`, {run['commit'][:7]}, {run['date']}, {where['cpu']}, "
        f"{where['cores']} cores, torch {where['torch']}. Gaps: evaluations, "
        "checkpoints, changes of plan.".replace("`", ""),
        style="quiet",
    )
