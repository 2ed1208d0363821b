"""Runs the parts of a run one after the other, and puts their logs together."""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faults.kills_worker import BATCH, PLACES, SAMPLES, STEPS, Part, run_part
from harness.child import RunFailed
from harness.forked import Ranks
from pipetransformer.checkpoint import format as checkpoint

PART_DEADLINE_S = 300.0


@dataclasses.dataclass(frozen=True)
class Done:
    """What a part did.

    Attributes:
        part: As it was asked for.
        start: Optimizer steps of the checkpoint that it went on from.
        logs: By rank, in the order of time.
        torn: What was done to the newest checkpoint after its end; empty: nothing.
        seconds: Wall time.
    """

    part: Part
    start: int
    logs: list[list[dict[str, Any]]]
    torn: str
    seconds: float

    def describe(self) -> dict[str, Any]:
        """Return what a reader of the results wants to know."""
        part = self.part
        return {
            "processes": part.world_size,
            "stages": part.num_stages,
            "from_step": self.start,
            "killed_at_step": part.kill_step,
            "killed": part.place if part.kill_step is not None else None,
            "newest_checkpoint": self.torn or "left as it was",
            "seconds": round(self.seconds, 2),
        }


@dataclasses.dataclass(frozen=True)
class Curve:
    """A whole run, put together from its parts.

    Attributes:
        losses: Mean training loss of each optimizer step's global batch.
        evaluations: Loss of the evaluation after each epoch.
        ids: Sample ids of each optimizer step.
        parts: The parts.
    """

    losses: list[float]
    evaluations: list[float]
    ids: list[list[int]]
    parts: list[Done]


def run_to_end(
    folder: Path, parts: Sequence[Part], tear: Callable[[int, Path], str]
) -> Curve:
    """Run all parts, each from what the one before left behind.

    Args:
        folder: Of the run; one folder per part, and one for the checkpoints.
        parts: All but the last are killed.
        tear: Called with a part's number and the checkpoints after its death; damages
            the newest one or not, and says what it did.

    Raises:
        RunFailed: a part ended otherwise than it should, or too late.
    """
    checkpoints = folder / "checkpoints"
    done = []
    for part in parts:
        place = folder / f"part-{part.number}"
        place.mkdir(parents=True)
        began = time.monotonic()
        logs = _run(place, part, str(checkpoints))
        spent = time.monotonic() - began
        torn = tear(part.number, checkpoints) if part.kill_step is not None else ""
        start = int(logs[0][0]["step"])
        done.append(Done(part, start, logs, torn, spent))
    return _joined(done)


def _run(place: Path, part: Part, checkpoints: str) -> list[list[dict[str, Any]]]:
    expected = 0 if part.kill_step is None else -signal.SIGKILL
    with Ranks(
        run_part, part.world_size, place, part, checkpoints, own_store=False
    ) as ranks:
        end = time.monotonic() + PART_DEADLINE_S
        for process in ranks.processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in ranks.processes]
        if codes != [expected] * part.world_size:
            raise RunFailed(
                f"{part}: expected exit codes {expected}, got {codes}\n"
                + "\n".join(filter(None, ranks.errors()))
            )
        return ranks.logs()


def _joined(parts: list[Done]) -> Curve:
    """Take each step from the last part that began at it or before."""
    epochs = parts[-1].part.epochs
    losses, ids = [], []
    for step in range(epochs * STEPS):
        last = [done for done in parts if done.start <= step][-1]
        entries = [
            entry
            for log in last.logs
            for entry in log
            if entry["kind"] == "step" and entry["step"] == step
        ]
        rows = sum(len(entry["ids"]) for entry in entries)
        total = sum(entry["loss"] * len(entry["ids"]) for entry in entries)
        losses.append(total / rows)
        ids.append([number for entry in entries for number in entry["ids"]])
    evaluations = {
        entry["epoch"]: entry["loss"]
        for done in parts
        for entry in done.logs[0]
        if entry["kind"] == "evaluation"
    }
    return Curve(losses, [evaluations[e] for e in range(epochs)], ids, parts)


def samples_exactly_once(curve: Curve) -> bool:
    """Tell whether each epoch's steps held every sample once, in whole batches."""
    epochs = len(curve.ids) // STEPS
    for epoch in range(epochs):
        steps = curve.ids[epoch * STEPS : (epoch + 1) * STEPS]
        if sorted(i for ids in steps for i in ids) != list(range(SAMPLES)):
            return False
        if any(len(ids) != BATCH for ids in steps[:-1]):
            return False
    return True


def random_parts(
    draw: random.Random, kills: int, epochs: int, *, plan: tuple[int, int] | None
) -> list[Part]:
    """Draw the parts of a run that is killed at random steps and places.

    Args:
        draw: The source of randomness.
        kills: Number of kills.
        epochs: Of the run.
        plan: N and K of all parts, without a cache; None: drawn for each part, N from
            1 to 4 and K from 1 to N (to 3 slots where N = 1).
    """
    steps = sorted(draw.randrange(1, epochs * STEPS) for _ in range(kills))
    parts = []
    for number in range(kills + 1):
        world = draw.randint(1, 4) if plan is None else plan[0]
        most = 3 if world == 1 else world
        stages = draw.randint(1, most) if plan is None else plan[1]
        part = Part(number, world, stages, epochs, cache=plan is None)
        if number < kills:
            place = draw.choice(PLACES)
            part = dataclasses.replace(part, kill_step=steps[number], place=place)
        parts.append(part)
    return parts


def tear_newest(draw: random.Random, number: int, checkpoints: Path) -> str:
    """Damage the newest checkpoint after about every third kill.

    Not the only whole one: where all are damaged, a run refuses to begin anew.
    """
    found = checkpoint.newest_valid(checkpoints)
    if found is None or draw.random() > 1 / 3:
        return ""
    path, _ = found
    others = (other for other in checkpoints.glob("step-*.pt") if other != path)
    if not any(map(_is_whole, others)):
        return ""
    data = bytearray(path.read_bytes())
    if draw.random() < 0.5:
        keep = draw.randrange(len(data))
        path.write_bytes(data[:keep])
        return f"cut to {keep} of {len(data)} bytes"
    at = draw.randrange(len(data) // 4, 3 * len(data) // 4)
    data[at] ^= 0xFF
    path.write_bytes(data)
    return f"byte {at} of {len(data)} changed"


def _is_whole(path: Path) -> bool:
    try:
        checkpoint.read(path)
    except ValueError:
        return False
    return True
