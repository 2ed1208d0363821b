"""``pipetransformer explain``: why a plan is as it is, or what a run did."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from pipetransformer.cli import arguments, drawing, files, output

if TYPE_CHECKING:
    from pipetransformer.explanation import Explanation, RunExplanation

_EXAMPLES = """
pipetransformer explain plan.json
pipetransformer explain plan.json --profile p.json --cluster c.json
pipetransformer explain runs/demo --json
"""


def add_parser(subparsers: arguments.Subparsers) -> None:
    """Add the command."""
    parser = arguments.add_command(
        subparsers,
        "explain",
        run,
        summary="tell why a plan is as it is, or what a run did",
        description=(
            "Reads a plan or a run's summary. With --profile and --cluster a plan is "
            "also compared with other ways to run the model, and its limiting "
            "resource is named."
        ),
        examples=_EXAMPLES,
    )
    add = parser.add_argument
    add("file", metavar="RUN_OR_PLAN", help="a plan, a run's folder, or its summary")
    add("--profile", metavar="FILE", help="costs of the layers, JSON")
    add("--cluster", metavar="FILE", help="the machines, JSON")


def run(parsed: argparse.Namespace) -> int:
    """Explain a plan or a run."""
    console = None if parsed.json else output.console()
    report = _report(parsed)
    if console is None:
        output.print_json(report.to_dict())
    else:
        drawing.draw(console, report.sections())
    return output.OK


def _report(parsed: argparse.Namespace) -> Explanation | RunExplanation:
    from pipetransformer.explanation import explain_plan, explain_run
    from pipetransformer.planner import Plan

    given = [parsed.profile, parsed.cluster]
    path = files.summary_file(parsed.file)
    text = files.read_text(path)
    value = _parse(path, text)
    try:
        subject = explain_run(value) if _is_run(value) else Plan.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(subject, Plan):
        if given != [None, None]:
            raise ValueError(
                f"{path}: expected a plan with --profile and --cluster, got "
                "the summary of a run"
            )
        return subject
    if given == [None, None]:
        return explain_plan(subject)
    if None in given:
        raise ValueError("--profile and --cluster: expected both or none, got one")
    profile = files.read_profile(parsed.profile)
    return explain_plan(subject, profile, files.read_cluster(parsed.cluster))


def _parse(path: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got text with {error}") from None


def _is_run(value: object) -> bool:
    keys = value.keys() if isinstance(value, dict) else set()
    if "cuts" in keys:
        return False
    if "epochs" in keys:
        return True
    raise ValueError(
        "expected a plan (with cuts) or the summary of a run (with epochs), got neither"
    )
