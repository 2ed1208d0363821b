#!/usr/bin/env python3
"""Renders the README's tables from the benchmarks' result files.

Usage: ``python tools/readme_tables.py`` rewrites README.md; with ``--check`` nothing is
written and the status is 1 if the README and the files differ. A table stands between
two lines of its own::

    <!-- results: NAME TABLE -->
    <!-- end results -->

NAME is a file of benchmarks/results without ``.json``, TABLE a key of ``TABLES``. Where
there is no such file the block says that this was not measured on this version: to take
figures back, remove the file and run this script.

Refused are results that do not say where they come from, of a tree with changes, of
another command than that of ``make bench`` (benchmarks/harness/commands.py) or of a
commit that is not in the history; quick ones, those with failed or too few repeats or
with a verdict that does not follow from the figures, and those that no table shows. For
each the script prints how many commits to what it measures are newer. Needs nothing but
the standard library.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import _ladder_tables
import _pipe_tables
import _planner_tables
import _run_tables
import _simulated_tables
import _step_tables
import _transformation_tables
from _markdown import Content, ratios, rows
from _origin import REPEATS, complaints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from harness.age import Age, age  # noqa: E402
from harness.commands import COMMANDS, Command  # noqa: E402

START = re.compile(r"<!-- results: (\S+) (\S+) -->")
END = "<!-- end results -->"


class TableError(ValueError):
    """A table that cannot be rendered, or must not be."""


# Table name -> lines of Markdown.
TABLES: dict[str, Callable[[Content], list[str]]] = {
    "accuracy": _run_tables.accuracy,
    "bounds": _run_tables.bounds,
    "curve": _transformation_tables.curve,
    "endurance": _transformation_tables.endurance,
    "faults": _transformation_tables.faults,
    "ladder": _ladder_tables.ladder,
    "losses": _transformation_tables.losses,
    "microbatches": _simulated_tables.microbatches,
    "models": _pipe_tables.models,
    "overhead": _pipe_tables.overhead,
    "paired": _run_tables.paired,
    "pauses": _transformation_tables.pauses,
    "plan_times": _planner_tables.plan_times,
    "quality": _planner_tables.quality,
    "ratios": ratios,
    "restarts": _transformation_tables.restarts,
    "rows": rows,
    "simulator": _simulated_tables.simulator,
    "steps": _step_tables.steps,
    "switches": _transformation_tables.switches,
    "table1": _run_tables.table1,
    "throughput": _pipe_tables.throughput,
    "timeline": _pipe_tables.timeline,
}


def load(path: Path) -> Content:
    """Read a result file that may be published.

    Raises:
        TableError: it may not, or is no JSON.
    """
    try:
        content: Content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise TableError(f"{path}: expected JSON, got {error}") from error
    if content.get("name") != path.stem:
        raise TableError(
            f"{path}: expected name {path.stem}, got {content.get('name')}"
        )
    found = list(complaints(content, command_of(path.stem).line))
    if not found and (grown := age_of(content)).foreign:
        found = [grown.why]
    if found:
        raise TableError("\n".join(f"{path}: {each}" for each in found))
    return content


def command_of(name: str) -> Command:
    """The command that takes a result.

    Raises:
        TableError: there is none.
    """
    if name not in COMMANDS:
        known = ", ".join(sorted(COMMANDS))
        raise TableError(f"{name}: expected a measurement of {known}, got another")
    return COMMANDS[name]


def age_of(content: Content) -> Age:
    """How many commits to what was measured are newer than a result."""
    return age(ROOT, content["commit"], COMMANDS[content["name"]].measures)


def render(text: str, results: Path) -> tuple[str, list[str]]:
    """The document with all its tables rendered anew, and their results' names.

    Raises:
        TableError: a table cannot be rendered, or a marker has no partner.
    """
    lines = iter(text.splitlines(keepends=True))
    out: list[str] = []
    names: list[str] = []
    for line in lines:
        out.append(line)
        found = START.fullmatch(line.strip())
        if line.strip() == END:
            raise TableError(f"{END}: expected a start marker before it, got none")
        if found is None:
            continue
        skip_old_table(lines, found.group())
        body = table(found.group(1), found.group(2), results)
        out += [f"{each}\n" for each in (*body, END)]
        names.append(found.group(1))
    return "".join(out), names


def require_tables(text: str, results: Path) -> None:
    """Refuse result files that the document does not show, and parts left of others.

    Raises:
        TableError: a file has no marker; a list of cases has no result file.
    """
    shown = {found.group(1) for found in START.finditer(text)}
    for path in sorted(results.glob("*.json")):
        if path.stem not in shown:
            raise TableError(f"{path}: expected a table in the README, got none")
    for path in sorted(results.glob("*.md")):
        if not path.with_suffix(".json").exists():
            raise TableError(f"{path}: expected a result file beside it, got none")


def skip_old_table(lines: Iterator[str], marker: str) -> None:
    """Consume the lines up to the end marker."""
    for line in lines:
        if line.strip() == END:
            return
        if START.fullmatch(line.strip()):
            break
    raise TableError(f"{marker}: expected {END} after it, got none")


def table(name: str, kind: str, results: Path) -> list[str]:
    """The lines of one table, and where its figures come from."""
    if kind not in TABLES:
        known = ", ".join(sorted(TABLES))
        raise TableError(f"{name} {kind}: expected a table of {known}, got {kind}")
    command, path = command_of(name), results / f"{name}.json"
    if not path.exists():
        how = f"`make {command.part}`, `{command.line}`"
        return ["", f"Not measured on this version ({how}).", ""]
    # A table may say what another result says.
    content = {**load(path), "folder": str(results)}
    return ["", *TABLES[kind](content), "", source(content), ""]


def source(content: Content) -> str:
    """What a table stands on."""
    machine = content["machine"]
    where = machine["cpu"] + (f", {machine['gpu']}" if machine["gpu"] else "")
    others = f"of which others used {content['foreign_share']:.1%}"
    told = (
        f"`{content['name']}.json`: {content['date']}, {content['commit'][:7]}, "
        f"{where}, {machine['cores']} cores {others}, torch {machine['torch']}."
    )
    kinds = dict.fromkeys(row["values_of"] for row in content["rows"])
    ranges = [kind for kind in kinds if kind != REPEATS]
    return f"{told} Ranges are over {', '.join(ranges)}." if ranges else told


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check the README; 1 if the check fails or a table is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--check", action="store_true", help="write nothing; show differences")
    add("--readme", type=Path, default=ROOT / "README.md", metavar="PATH")
    add("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    args = parser.parse_args(arguments)
    old = args.readme.read_text()
    try:
        new, names = render(old, args.results)
        require_tables(new, args.results)
    except TableError as error:
        print(f"readme_tables: {error}")
        return 1
    if args.check and new != old:
        before, after = old.splitlines(), new.splitlines()
        titles = (str(args.readme), "rendered from the results")
        print(*difflib.unified_diff(before, after, *titles, lineterm=""), sep="\n")
        return 1
    if not args.check:
        args.readme.write_text(new)
    for path in sorted(args.results.glob("*.json")):
        print(f"{path.name}: {age_of(load(path))}")
    absent = sum(not (args.results / f"{name}.json").exists() for name in names)
    print(f"readme_tables: {len(names)} tables, {absent} of them not measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
