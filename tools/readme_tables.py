#!/usr/bin/env python3
"""Renders the tables of README.md and docs/results from the benchmarks' result files.

Usage: ``python tools/readme_tables.py`` rewrites the pages; with ``--check`` nothing is
written and the status is 1 if a page and the files differ. A table stands between two
lines of its own::

    <!-- results: NAME TABLE -->
    <!-- end results -->

NAME is a file of benchmarks/results without ``.json``, TABLE a key of ``TABLES``. Where
there is no such file the block says that this was not measured on this version: to take
figures back, remove the file and run this script. ``<!-- results: headline -->`` begins
the table of a row per question, drawn from several files (``_headline.py``), and
``<!-- results: targets -->`` that of all that is aimed at (``_targets.py``).

Refused are results that do not say where they come from, of a tree with changes, of
another command than that of ``make bench`` (benchmarks/harness/commands.py) or of a
commit that is not in the history; quick ones, those with failed or too few repeats or
with a verdict that does not follow from the figures, and those that no page shows in a
table of their own. For each the script prints how many commits to what it measures are
newer. Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import _headline
import _ladder_tables
import _pipe_tables
import _planner_tables
import _run_tables
import _simulated_tables
import _step_tables
import _targets
import _transformation_tables
from _markdown import Content, bounded, ratios, rows
from _origin import REPEATS, complaints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from harness.age import Age, age  # noqa: E402
from harness.commands import COMMANDS, Command  # noqa: E402
from harness.kept import seeds_to_come  # noqa: E402

START = re.compile(r"<!-- results: (\S+) (\S+) -->")
HEADLINE = "<!-- results: headline -->"
TARGETS = "<!-- results: targets -->"
END = "<!-- end results -->"
WIDTH = 120  # of a line that is no table's


class TableError(ValueError):
    """A table that cannot be rendered, or must not be."""


# Table name -> lines of Markdown.
TABLES: dict[str, Callable[[Content], list[str]]] = {
    "accuracy": _run_tables.accuracy,
    "bounded": bounded,
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
    """How many commits to what was measured are newer than a result's oldest part."""
    commits = content.get("commits") or [content["commit"]]
    paths = COMMANDS[content["name"]].measures
    return max(
        (age(ROOT, commit, paths) for commit in commits),
        key=lambda each: (each.foreign, each.newer is None, each.newer or 0),
    )


def render(text: str, page: Path, results: Path) -> tuple[str, list[str]]:
    """The page with all its tables rendered anew, and their results' names.

    Raises:
        TableError: a table cannot be rendered, or a marker has no partner.
    """
    lines = iter(text.splitlines(keepends=True))
    out: list[str] = []
    names: list[str] = []
    for line in lines:
        out.append(line)
        marker = line.strip()
        found = START.fullmatch(marker)
        if marker == END:
            raise TableError(f"{END}: expected a start marker before it, got none")
        if marker in (HEADLINE, TARGETS):
            skip_old_table(lines, marker)
            drawn = headline if marker == HEADLINE else targets
            body = drawn(page, results)
        elif found is not None:
            skip_old_table(lines, marker)
            body = table(found.group(1), found.group(2), page, results)
            names.append(found.group(1))
        else:
            continue
        out += [f"{each}\n" for each in (*wrapped(body), END)]
    return "".join(out), names


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    """The lines, none but a table's longer than `WIDTH`."""
    for line in lines:
        if line.startswith("|") or len(line) <= WIDTH:
            yield line
        else:
            yield from textwrap.wrap(
                line, WIDTH, break_long_words=False, break_on_hyphens=False
            )


def require_tables(texts: Iterable[str], results: Path) -> None:
    """Refuse result files that no page shows, and parts left of others.

    Raises:
        TableError: a file has no marker; a list of cases has no result file.
    """
    shown = {found.group(1) for text in texts for found in START.finditer(text)}
    for path in sorted(results.glob("*.json")):
        if path.stem not in shown:
            raise TableError(f"{path}: expected a table on a page, got none")
    for path in sorted(results.glob("*.md")):
        if not path.with_suffix(".json").exists():
            raise TableError(f"{path}: expected a result file alongside it, got none")


def skip_old_table(lines: Iterator[str], marker: str) -> None:
    """Consume the lines up to the end marker."""
    for line in lines:
        if line.strip() == END:
            return
        if START.fullmatch(line.strip()) or line.strip() in (HEADLINE, TARGETS):
            break
    raise TableError(f"{marker}: expected {END} after it, got none")


def headline(page: Path, results: Path) -> list[str]:
    """The lines of the table of a row per question."""
    found = {}
    for name in _headline.NAMES:
        path = results / f"{name}.json"
        command_of(name)
        found[name] = load(path) if path.exists() else None
    pages = os.path.relpath(ROOT / "docs" / "results", page.parent)
    return ["", *_headline.headline(found, pages), ""]


def targets(page: Path, results: Path) -> list[str]:
    """The lines of the table of all that is aimed at."""
    paths = {name: results / f"{name}.json" for name in COMMANDS}
    files = {name: load(path) for name, path in paths.items() if path.exists()}
    found = {name: c for name, c in files.items() if not seeds_to_come(c)}
    return ["", *_targets.targets(found), ""]


def table(name: str, kind: str, page: Path, results: Path) -> list[str]:
    """The lines of one table, and where its figures come from."""
    if kind not in TABLES:
        known = ", ".join(sorted(TABLES))
        raise TableError(f"{name} {kind}: expected a table of {known}, got {kind}")
    command, path = command_of(name), results / f"{name}.json"
    if not path.exists():
        how = f"`make {command.part}`, `{command.line}`"
        return ["", f"Not measured on this version ({how}).", ""]
    # A table may say what another result says, or lead to a list of cases.
    places = {"folder": str(results), "link": os.path.relpath(results, page.parent)}
    content = {**load(path), **places}
    if lacking := seeds_to_come(content):
        how = f"`make {command.part}`, `{command.line}`"
        return ["", f"Not whole yet: {lacking} ({how}).", "", source(content), ""]
    return ["", *TABLES[kind](content), "", source(content), ""]


def source(content: Content) -> str:
    """What a table stands on."""
    commits = content.get("commits") or [content["commit"]]
    machine = content["machine"]
    where = machine["cpu"] + (f", {machine['gpu']}" if machine["gpu"] else "")
    share = content["foreign_share"]
    others = (
        "(too short to tell what others used)"
        if share is None
        else f"of which others used {share:.1%}"
    )
    told = (
        f"`{content['name']}.json`: {content['date']}, "
        f"{', '.join(commit[:7] for commit in commits)}, "
        f"{where}, {machine['cores']} cores {others}, torch {machine['torch']}."
    )
    kinds = dict.fromkeys(row["values_of"] for row in content["rows"])
    ranges = [kind for kind in kinds if kind != REPEATS]
    return f"{told} Ranges are over {', '.join(ranges)}." if ranges else told


def pages() -> list[Path]:
    """Where the tables stand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check the pages; 1 if the check fails or a table is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--check", action="store_true", help="write nothing; show differences")
    add("--page", type=Path, action="append", metavar="PATH", help="instead of all")
    add("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    args = parser.parse_args(arguments)
    old = {page: page.read_text() for page in args.page or pages()}
    new: dict[Path, str] = {}
    names: list[str] = []
    try:
        for page, text in old.items():
            new[page], shown = render(text, page, args.results)
            names += shown
        require_tables(new.values(), args.results)
    except TableError as error:
        print(f"readme_tables: {error}")
        return 1
    changed = [page for page in old if new[page] != old[page]]
    for page in changed:
        if args.check:
            show_difference(page, old[page], new[page])
        else:
            page.write_text(new[page])
    if args.check and changed:
        return 1
    for path in sorted(args.results.glob("*.json")):
        print(f"{path.name}: {age_of(load(path))}")
    absent = sum(not (args.results / f"{name}.json").exists() for name in names)
    print(f"readme_tables: {len(names)} tables, {absent} of them not measured")
    return 0


def show_difference(page: Path, old: str, new: str) -> None:
    """Print what rendering would change."""
    titles = (str(page), "rendered from the results")
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), *titles, lineterm=""
    )
    print(*lines, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
