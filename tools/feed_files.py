#!/usr/bin/env python3
"""Feeds damaged files to the product: profiles, plans, summaries, checkpoints.

python tools/feed_files.py                            # 100,000 files, all kinds
python tools/feed_files.py --kinds plan.json --inputs 500 --seed 3
python tools/feed_files.py --kinds plan.json --first 1234 --inputs 1 --keep /tmp/bad

Each file must be taken, or refused with the documented error that names the file or the
field. Any other exception, a death, a hang, control characters on the console, a flood
of output, and more memory than `MOST_BYTES` beyond what torch takes are faults: printed
with the number that repeats the case, and the status is 1. A number and a seed make the
same file again, whatever came before it.

The C++ that reads bytes of others is fed under sanitizers: ``tools/sanitize.sh``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _file_kinds import Kind, kinds  # noqa: E402 - from a checkout

INPUTS = 100_000
PER_PROCESS = 2_000
MOST_BYTES = 2**30
HANG_CPU_S = 60.0
HANG_S = 300.0
_LOOK_S = 1.0


@dataclass
class Tally:
    """What became of the files of a kind.

    Attributes:
        taken: Files that were read.
        refused: Files that were refused as documented.
        faults: The numbers of the others, by what happened.
    """

    taken: int = 0
    refused: int = 0
    faults: dict[str, list[int]] = field(default_factory=dict)

    def add(self, number: int, outcome: str) -> None:
        """Count the file `number`."""
        if outcome == "taken":
            self.taken += 1
        elif outcome == "refused":
            self.refused += 1
        else:
            self.faults.setdefault(outcome, []).append(number)


def make(kind: Kind, seed: int, number: int) -> bytes:
    """Return a damaged file: that of the seed and the number."""
    return kind.damaged(random.Random(f"{seed} {kind.name} {number}"))


def feed(kind: Kind, seed: int, numbers: range, folder: Path) -> Tally:
    """Feed files to processes of their own: what ends one ends no other case.

    Args:
        kind: Of the files.
        seed: Of all numbers.
        numbers: Of the files.
        folder: Where they are written.
    """
    tally, left = Tally(), numbers
    while left:
        outcomes = _fed(kind, seed, left[:PER_PROCESS], folder)
        for number, outcome in outcomes:
            tally.add(number, outcome)
        left = left[len(outcomes) :]
    return tally


def _fed(kind: Kind, seed: int, numbers: range, folder: Path) -> list[tuple[int, str]]:
    """Feed files to one process, as far as it comes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            _feed_here(kind, seed, numbers, folder, writer)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    ended, lines = _collect(child, reader)
    found = list(zip(numbers, lines, strict=False))
    if len(found) < len(numbers):
        found.append((numbers[len(found)], ended))
    return found


def _feed_here(
    kind: Kind, seed: int, numbers: range, folder: Path, writer: int
) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # of torch, about tensors that nobody asked for
    path = folder / kind.name
    for number in numbers:
        path.write_bytes(make(kind, seed, number))
        try:
            outcome = "taken" if kind.read(path) else "refused"
        except BaseException as error:
            outcome = describe(error)
        os.write(writer, json.dumps(outcome).encode() + b"\n")


def describe(error: BaseException) -> str:
    """Return what happened and where, equal for equal causes."""
    frames = traceback.extract_tb(error.__traceback__)
    where = frames[-1] if frames else None
    place = f"{Path(where.filename).name}:{where.lineno}" if where else "nowhere"
    return f"{type(error).__name__} at {place}: {str(error)[:160]}"


def _collect(child: int, reader: int) -> tuple[str, list[str]]:
    """Return how a process ended, and its lines; kill it where it hangs."""
    data, waited_s, ended = b"", 0.0, ""
    used_s = _cpu_s(child)
    while True:
        before = time.monotonic()
        if select.select([reader], [], [], _LOOK_S)[0]:
            part = os.read(reader, 2**16)
            if not part:
                break
            data, waited_s, used_s = data + part, 0.0, _cpu_s(child)
            continue
        # This machine may stand still: a gap counts as one look.
        waited_s += min(time.monotonic() - before, 2 * _LOOK_S)
        if waited_s > HANG_S or _cpu_s(child) - used_s > HANG_CPU_S:
            ended = "hang"
            os.kill(child, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
    return ended or f"death: exit code {code}", lines


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--inputs", type=int, default=INPUTS, help="files, over all kinds")
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, help="number of the first file of a kind")
    add("--kinds", nargs="+", metavar="KIND", help="of these kinds; default all")
    add("--keep", type=Path, metavar="FOLDER", help="keep files that made faults here")
    args = parser.parse_args(arguments)
    if args.inputs < 1 or args.first < 0:
        parser.error("--inputs, --first: expected at least 1 and 0")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Feed files of all kinds; 1 if there was a fault."""
    args = parse_args(arguments)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = kinds(folder)
        chosen = args.kinds or sorted(found)
        if unknown := set(chosen) - set(found):
            print(f"--kinds: expected some of {sorted(found)}, got {sorted(unknown)}")
            return 2
        place = folder / "damaged"
        place.mkdir()
        for index, kind in enumerate(found[each] for each in chosen):
            share = args.inputs // len(chosen) + (index < args.inputs % len(chosen))
            numbers = range(args.first, args.first + share)
            tally = feed(kind, args.seed, numbers, place)
            num_faults = sum(map(len, tally.faults.values()))
            counts.update(inputs=share, faults=num_faults)
            print(
                f"{kind.name}: {share} files, {tally.taken} taken, {tally.refused} "
                f"refused, {num_faults} faults",
                flush=True,
            )
            for outcome, at in sorted(tally.faults.items(), key=lambda x: -len(x[1])):
                print(f"  {len(at)} x {outcome!r}, first --first {at[0]}", flush=True)
                if args.keep is not None:
                    args.keep.mkdir(parents=True, exist_ok=True)
                    kept = args.keep / f"{at[0]}-{kind.name}"
                    kept.write_bytes(make(kind, args.seed, at[0]))
    print(f"{counts['inputs']} files, {counts['faults']} faults, seed {args.seed}")
    return 1 if counts["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
