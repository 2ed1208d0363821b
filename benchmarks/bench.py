"""Takes the published measurements, with exactly the commands that they are of.

python benchmarks/bench.py                     all of `make bench` that is due
python benchmarks/bench.py --again             all of it
python benchmarks/bench.py paper_ladder ...    these, by the names of their result files

Due is what has no result, one of a command that failed, or one that is older than the
code it measures: so a call that was cut short goes on where it stopped. Before each
measurement stands how long those to come took the last time.

A tree that differs from its commit is refused, since its results could not be
published. A measurement that fails does not keep the others from being taken; the
status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from harness.commands import BENCH, COMMANDS, HOSTS, MODELS, SEEDS, Command
from harness.kept import note_failure, result_of, why_again
from harness.provenance import ROOT, tree_of


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="of a result file")
    add(
        "--part",
        choices=(BENCH, SEEDS, HOSTS, MODELS),
        default=BENCH,
        help="without names",
    )
    add("--again", action="store_true", help="also what is not due; names always are")
    add("--list", action="store_true", help="print the commands and run nothing")
    args = parser.parse_args(arguments)
    for name in args.names:
        if name not in COMMANDS:
            parser.error(f"NAME: expected one of {', '.join(COMMANDS)}, got {name}")
    return args


def chosen(names: Sequence[str], part: str) -> list[Command]:
    """Return the commands of these names, or all of a part."""
    if names:
        return [COMMANDS[name] for name in dict.fromkeys(names)]
    return [command for command in COMMANDS.values() if command.part == part]


def due(commands: Sequence[Command]) -> list[Command]:
    """Return those whose results do not stand, and print which do, and why not."""
    found = []
    for command in commands:
        why = why_again(command, result_of(command, ROOT), ROOT)
        print(f"{command.name}: {why or 'stands'}")
        if why:
            found.append(command)
    return found


def left(commands: Sequence[Command]) -> str:
    """Say how long measurements take, by what they took the last time."""
    results = [result_of(command, ROOT) or {} for command in commands]
    known = [float(each["took_s"]) for each in results if each.get("took_s")]
    unknown = len(results) - len(known)
    parts = [f"about {math.ceil(sum(known) / 60)} min"] if known else []
    parts += [f"{unknown} of unknown length"] if unknown else []
    return " and ".join(parts)


def run_all(commands: Sequence[Command]) -> list[str]:
    """Run each to its end; return the names of those that failed."""
    # The cores are shared with other programs: one intra-op thread per process.
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    failed = []
    for place, command in enumerate(commands):
        rest = commands[place:]
        print(f"\n{place + 1} of {len(commands)}; left: {left(rest)}")
        print(f"$ {command.line}", flush=True)
        line, begun = [sys.executable, *command.arguments], time.time()
        status = subprocess.run(line, cwd=ROOT, env=env, check=False).returncode
        if status != 0:
            note_failure(command, status, begun, ROOT)
            failed.append(command.name)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    commands = chosen(args.names, args.part)
    if args.list:
        print("\n".join(command.line for command in commands))
        return 0
    tree = tree_of(ROOT)
    if tree.commit is None or tree.changed:
        found = ", ".join(tree.changed) or "no git checkout"
        print(f"bench: expected a clean tree, got {found}", file=sys.stderr)
        return 1
    if not (args.names or args.again):
        commands = due(commands)
    failed = run_all(commands)
    for name in failed:
        print(f"bench: {name} failed", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
