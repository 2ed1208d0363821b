"""``pipetransformer doctor``: what is there, what is missing, and what to do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pipetransformer.cli import checks, drawing, output, self_test
from pipetransformer.cli.arguments import Subparsers, add_command
from pipetransformer.cli.machine import read_facts

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {checks.OK: "green", checks.NOTE: "yellow", checks.MISSING: "bold red"}


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers,
        "doctor",
        run,
        summary="look for what is missing on this machine",
        description="Looks at Python, torch, the extension, devices, network and "
        "limits. Each line is ok, a note, or missing with what to do; the exit code "
        "is 1 if something needed is missing.",
        examples="""
            pipetransformer doctor
            pipetransformer doctor --json
            pipetransformer doctor --run
            MASTER_ADDR=node0 pipetransformer doctor
        """,
    )
    parser.add_argument(
        "--run",
        dest="trains",
        action="store_true",
        help="train for a moment on two processes, too: a change of plan, the cache, "
        "the loss of a process, a report",
    )


def run(arguments: argparse.Namespace) -> int:
    """Look at this machine and report."""
    console = None if arguments.json else output.console()
    found = checks.findings(read_facts(os.environ))
    if arguments.trains and not any(f.status == checks.MISSING for f in found):
        found += self_test.findings()
    missing = [finding.name for finding in found if finding.status == checks.MISSING]
    if console is None:
        rows = [asdict(finding) for finding in found]
        output.print_json({"version": 1, "findings": rows, "missing": missing})
    else:
        drawing.print_table(console, _table(found))
        console.print(
            f"missing: {', '.join(missing)}" if missing else "nothing missing"
        )
    return output.NEGATIVE if missing else output.OK


def _table(found: Sequence[checks.Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for whole in (True, True, False):
        table.add_column(no_wrap=whole)
    for finding in found:
        value = Text(finding.value)
        if finding.advice:
            value.append(f"\n-> {finding.advice}", style="italic")
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, finding.name, value)
    return table
