"""``pipetransformer report``: runs as one page, for a browser."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pipetransformer.cli import arguments, files, output

_EXAMPLES = """
pipetransformer report runs/demo
pipetransformer report runs/elastic runs/static/summary.json --output compared.html
"""


def add_parser(subparsers: arguments.Subparsers) -> None:
    """Add the command."""
    parser = arguments.add_command(
        subparsers,
        "report",
        _run,
        summary="show a run, or compare several, as one HTML page",
        description="Reads what Config(report=DIR) or report.write_summary wrote, and "
        "writes a page that needs no network.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="a run's folder, or its summary"
    )
    parser.add_argument(
        "--output",
        type=arguments.file_name,
        metavar="FILE",
        default="report.html",
        help="the page; default: report.html in this folder; - prints it alone",
    )


def _run(parsed: argparse.Namespace) -> int:
    from pipetransformer.core import disk
    from pipetransformer.report import page

    to_output = parsed.output == files.STANDARD_STREAM
    if to_output and parsed.json:
        raise ValueError(
            "--output: expected a file alongside --json, got standard output"
        )
    runs = dict(_read(parsed.runs))
    if not to_output:
        disk.make_folder(os.path.dirname(os.path.abspath(parsed.output)))
    files.write_text(parsed.output, page(runs))
    if to_output:
        return output.OK
    if parsed.json:
        output.print_json({"version": 1, "page": parsed.output})
    else:
        sys.stdout.write(parsed.output + "\n")
    return output.OK


def _read(paths: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each run's name and summary; names are as short as they tell apart."""
    from pipetransformer.explanation import explain_run
    from pipetransformer.report.page import run_data

    places = [files.summary_file(path) for path in paths]
    names = _names(places)
    for place, name in zip(places, names, strict=True):
        text = files.read_text(place)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: expected JSON, got text with {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{place}: expected the summary of a run, got another one")
        with files.named(place, text, "run's summary"):
            explain_run(value)  # checks as `explain` does
            run_data(name, value)
        yield name, value


def _names(places: Sequence[str]) -> list[str]:
    """Return a folder's name for a run, or as much of its path as is needed."""
    parts = [os.path.normpath(os.path.abspath(place)).split(os.sep) for place in places]
    for own in parts:
        if own[-1] == "summary.json":
            own.pop()
    for depth in range(1, max(map(len, parts)) + 1):
        names = [os.sep.join(own[-depth:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"RUN: expected different runs, got one twice in {list(places)}")
