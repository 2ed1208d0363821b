#!/usr/bin/env python3
"""Renders the README's tables from the benchmarks' result files.

Usage: ``python tools/readme_tables.py`` rewrites README.md; with ``--check`` nothing is
written and the status is 1 if the README and the files differ. A table stands between
two lines of its own::

    <!-- results: NAME TABLE -->
    <!-- end results -->

NAME is a file of benchmarks/results without ``.json``, TABLE a key of ``TABLES``.
Quick results, those with failed or too few repeats, and those that no table shows are
refused. Needs nothing but the standard library.
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
import _transformation_tables
from _markdown import Content, ratios, rows

ROOT = Path(__file__).resolve().parent.parent
START = re.compile(r"<!-- results: (\S+) (\S+) -->")
END = "<!-- end results -->"
MIN_REPEATS = 3


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
    "microbatches": _simulated_tables.microbatches,
    "models": _pipe_tables.models,
    "overhead": _pipe_tables.overhead,
    "pauses": _transformation_tables.pauses,
    "plan_times": _planner_tables.plan_times,
    "quality": _planner_tables.quality,
    "ratios": ratios,
    "restarts": _transformation_tables.restarts,
    "rows": rows,
    "simulator": _simulated_tables.simulator,
    "switches": _transformation_tables.switches,
    "table1": _run_tables.table1,
    "throughput": _pipe_tables.throughput,
    "timeline": _pipe_tables.timeline,
}


def load(path: Path) -> Content:
    """Read a result file that may be published.

    Raises:
        TableError: no such file, or a quick, failed or foreign one.
    """
    try:
        content: Content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise TableError(f"{path}: expected a result file, got none") from error
    except json.JSONDecodeError as error:
        raise TableError(f"{path}: expected JSON, got {error}") from error
    name, quick = content.get("name"), content.get("quick")
    if name != path.stem:
        raise TableError(f"{path}: expected name {path.stem}, got {name}")
    if quick is not False:
        raise TableError(f"{path}: expected quick false, got {quick}")
    for row in content["rows"]:
        if row["failed"] or len(row["values"]) < MIN_REPEATS:
            raise TableError(
                f"{path}: {row['system']}, {row['metric']}: expected {MIN_REPEATS} "
                f"repeats without failure, got {row['failed']} failed, "
                f"{len(row['values'])} clean"
            )
    return content


def render(text: str, results: Path) -> tuple[str, int]:
    """The document with all its tables rendered anew, and their number.

    Raises:
        TableError: a table cannot be rendered, or a marker has no partner.
    """
    lines = iter(text.splitlines(keepends=True))
    out, count = [], 0
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
        count += 1
    return "".join(out), count


def require_tables(text: str, results: Path) -> None:
    """Refuse result files that the document does not show.

    A file without "quick" is no result of the harness.

    Raises:
        TableError: a file has no marker.
    """
    shown = {found.group(1) for found in START.finditer(text)}
    for path in sorted(results.glob("*.json")):
        if path.stem not in shown and "quick" in json.loads(path.read_text()):
            raise TableError(f"{path}: expected a table in the README, got none")


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
    content = load(results / f"{name}.json")
    machine = content["machine"]
    where = machine["cpu"] + (f", {machine['gpu']}" if machine["gpu"] else "")
    source = (
        f"`{name}.json`: {content['date']}, {where}, {machine['cores']} cores, "
        f"torch {machine['torch']}."
    )
    return ["", *TABLES[kind](content), "", source, ""]


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
        new, count = render(old, args.results)
        require_tables(new, args.results)
    except TableError as error:
        print(f"readme_tables: {error}")
        return 1
    if args.check and new != old:
        before, after = old.splitlines(), new.splitlines()
        names = (str(args.readme), "rendered from the results")
        print(*difflib.unified_diff(before, after, *names, lineterm=""), sep="\n")
        return 1
    if not args.check:
        args.readme.write_text(new)
    print(f"readme_tables: {count} tables")
    return 0


if __name__ == "__main__":
    sys.exit(main())
