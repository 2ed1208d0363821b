"""Where the time of a training step goes: own time of functions, by part of the engine.

A profile knows functions; what is asked for are parts: batches, guard, clocks, pipe.
A function of the engine or of torch belongs to the part of its folder. Any other, of C
or of Python's library, works for whoever calls it; so do torch's helpers that walk over
modules or show ranges to a profiler.
"""

from __future__ import annotations

import pstats
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

import pipetransformer

LOADING, WRAPPING = "sampler and collate", "batch wrapping"
GUARD, CLOCKS, COUNTING = "guard of an operation", "clocks", "history"
HOOK, PIPE, CACHE, REST = "optimizer hook", "pipe call", "cache", "engine, other"
DDP, OPTIMIZER, TORCH = "torch: DDP", "torch: optimizer", "torch: other"
LOOP = "loop"
OWN = (LOADING, WRAPPING, GUARD, CLOCKS, COUNTING, HOOK, PIPE, CACHE, REST)
PARTS = (*OWN, DDP, OPTIMIZER, TORCH, LOOP)

# File or folder, without suffix -> part, None: its callers'; the longest that fits
# counts.
PLACES: dict[str, str | None] = {
    "pipetransformer": REST,
    "pipetransformer/autocache": CACHE,
    "pipetransformer/autodp": GUARD,
    "pipetransformer/data": WRAPPING,
    "pipetransformer/data/sampler": LOADING,
    "pipetransformer/data/structures": PIPE,
    "pipetransformer/pipe": PIPE,
    "pipetransformer/progress/counts": COUNTING,
    "pipetransformer/progress/open_pass": COUNTING,
    "pipetransformer/recovery": GUARD,
    "pipetransformer/replica": PIPE,
    "pipetransformer/replica/draws": PIPE,
    "pipetransformer/replica/frozen_prefix": CACHE,
    "pipetransformer/report": CLOCKS,
    "pipetransformer/run/context": GUARD,
    "pipetransformer/run/control_log": GUARD,
    "pipetransformer/skip": PIPE,
    "torch": TORCH,
    "torch/_dynamo": None,
    "torch/_ops": None,
    "torch/_tensor": None,
    "torch/autograd/profiler": None,
    "torch/nn/modules/container": None,
    "torch/nn/modules/module": None,
    "torch/nn/parallel": DDP,
    "torch/optim": OPTIMIZER,
    "torch/utils/_contextlib": None,
    "torch/utils/data": LOADING,
    "benchmarks": LOOP,
}
CALLS = ("_call_impl", "_wrapped_call_impl", "forward")  # of a module: no helpers
HOOKS = ("_before_step", "_after_step")  # that the engine puts on the optimizer
SAMPLES = ("__getitem__", "inputs", "targets", "input_key")  # of the data set
_HERE = Path(__file__).resolve().parents[1]
_ROOTS = {
    "pipetransformer": str(Path(pipetransformer.__file__).parent),
    "torch": str(Path(torch.__file__).parent),
    "benchmarks": str(_HERE),
}
ENTERING = "contextlib.py"  # goes on with a generator where a block begins and ends
NEXT = ("~", 0, "<built-in method builtins.next>")

Function = tuple[str, int, str]  # file, line, name, as `pstats` has them
Shares = dict[str, float]


@dataclass(frozen=True)
class Own:
    """What a part took of a step.

    Attributes:
        us: Own time, the profiler's in it.
        calls: Calls of Python functions.
        c_calls: Calls of functions of C.
    """

    us: float = 0.0
    calls: float = 0.0
    c_calls: float = 0.0

    def plus(self, other: Own) -> Own:
        """Return both together."""
        return Own(
            self.us + other.us, self.calls + other.calls, self.c_calls + other.c_calls
        )


def place_of(file: str) -> str | None:
    """Return a file's path from the folder that holds its package, without suffix.

    None for what is neither of the engine nor of torch nor a benchmark.
    """
    for name, root in _ROOTS.items():
        if file.startswith(f"{root}/"):
            return f"{name}/{file[len(root) + 1 :].removesuffix('.py')}"
    return None


def part_of(function: Function) -> str | None:
    """Return the part that a function belongs to by itself; None: its callers'."""
    file, _, name = function
    place = place_of(file)
    if place is None:
        return None
    if place.startswith("pipetransformer/") and name in HOOKS:
        return HOOK
    if place.startswith("benchmarks/") and name in SAMPLES:
        return LOADING
    if place.startswith("torch/nn/modules/") and name in CALLS:
        return TORCH
    steps = place.split("/")
    whole = ("/".join(steps[:end]) for end in range(len(steps), 0, -1))
    return next(PLACES[each] for each in whole if each in PLACES)


class Profile:
    """The own times of a profile, by part.

    Args:
        stats: The ``stats`` of a ``pstats.Stats``: by function its calls, own time,
            whole time, and the same by caller.
    """

    def __init__(self, stats: Mapping[Function, tuple[object, ...]]) -> None:
        self._stats: Mapping[Function, tuple[object, ...]] = stats
        self._known: dict[Function, Shares] = {}
        self._entered = self._shares_of_entered()

    def parts(self, steps: int) -> dict[str, Own]:
        """Return what each part took of one of so many steps."""
        found: dict[str, Own] = {}
        for function, entry in self._stats.items():
            _, calls, own_s, _, _ = _numbers(entry)
            in_c = function[0] == "~"
            whole = Own(
                1e6 * own_s / steps,
                0.0 if in_c else calls / steps,
                calls / steps if in_c else 0.0,
            )
            for part, share in self._shares(function).items():
                piece = Own(
                    share * whole.us, share * whole.calls, share * whole.c_calls
                )
                found[part] = found.get(part, Own()).plus(piece)
        return {part: found[part] for part in PARTS if part in found}

    def _shares(self, function: Function) -> Shares:
        """Return how a function's own time is divided among the parts."""
        if function in self._known:
            return self._known[function]
        part = part_of(function)
        if part is not None:
            shares = {part: 1.0}
        elif function[0].endswith(ENTERING) and self._entered:
            # It is called by whoever has the block, and works for what is entered.
            shares = self._entered
        else:
            self._known[function] = {}  # what it calls itself does not count
            shares = self._shares_of_callers(function)
        self._known[function] = shares
        return shares

    def _shares_of_callers(self, function: Function) -> Shares:
        callers = _numbers(self._stats[function])[4] if function in self._stats else {}
        parts = [
            (own_s, self._shares(caller)) for caller, (_, own_s) in callers.items()
        ]
        return _mean(parts) or {LOOP: 1.0}

    def _shares_of_entered(self) -> Shares:
        parts = []
        for function, entry in self._stats.items():
            calls, part = _numbers(entry)[4].get(NEXT, (0, 0.0))[0], part_of(function)
            if part not in (None, LOOP):
                parts.append((float(calls), {str(part): 1.0}))
        return _mean(parts)


def _numbers(
    entry: tuple[object, ...],
) -> tuple[int, int, float, float, dict[Function, tuple[int, float]]]:
    """Return an entry of a profile; of each caller the calls and the own time."""
    primitive, calls, own_s, whole_s, callers = entry
    found = {caller: (each[1], each[2]) for caller, each in callers.items()}  # type: ignore[attr-defined]
    return primitive, calls, own_s, whole_s, found  # type: ignore[return-value]


def _mean(parts: list[tuple[float, Shares]]) -> Shares:
    total = sum(weight for weight, shares in parts if shares)
    if total <= 0:
        return {}
    found: Shares = {}
    for weight, shares in parts:
        for part, share in shares.items():
            found[part] = found.get(part, 0.0) + weight / total * share
    return found


def parts_of(stats: pstats.Stats, steps: int) -> dict[str, Own]:
    """Return what each part took of one of the profiled steps."""
    return Profile(stats.stats).parts(steps)  # type: ignore[attr-defined]


def own_frames(frame: FrameType | None = None) -> list[str]:
    """Return the engine's files on the stack, from the innermost; one per frame."""
    found = []
    for each in _frames(frame or sys._getframe(1)):
        place = place_of(each.f_code.co_filename)
        if place is not None and place.startswith("pipetransformer/"):
            found.append(place)
    return found


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
