"""``pipetransformer simulate``: plays a plan, without any device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pipetransformer.cli import arguments, drawing, files, output

if TYPE_CHECKING:
    from rich.console import Console

    from pipetransformer.planner import Cluster, Plan
    from pipetransformer.simulator import Simulation

_EXAMPLES = """
pipetransformer simulate --plan plan.json --profile p.json --cluster c.json
pipetransformer simulate --plan plan.json --profile p.json --cluster c.json \\
    --steps 100 --json
pipetransformer simulate --plan plan.json --profile p.json --cluster c.json \\
    --trace step.json
"""


def add_parser(subparsers: arguments.Subparsers) -> None:
    """Add the command."""
    parser = arguments.add_command(
        subparsers,
        "simulate",
        run,
        summary="play a plan on a simulated cluster",
        description=(
            "Runs the plan's operations on simulated devices, links and caches. "
            "--trace writes a timeline for Perfetto (ui.perfetto.dev)."
        ),
        examples=_EXAMPLES,
    )
    add = parser.add_argument
    add("--plan", required=True, metavar="FILE", help="what plan --output wrote")
    add("--profile", required=True, metavar="FILE", help="costs of the layers, JSON")
    add("--cluster", required=True, metavar="FILE", help="the machines, JSON")
    add(
        "--steps",
        type=arguments.count,
        default=1,
        metavar="S",
        help="training steps (default 1)",
    )
    add(
        "--trace",
        type=arguments.file_name,
        metavar="FILE",
        help="write the timeline of a step; - prints it alone",
    )


def run(parsed: argparse.Namespace) -> int:
    """Simulate, write, print."""
    from pipetransformer.explanation import hash_notes
    from pipetransformer.simulator import simulate

    to_output = parsed.trace == files.STANDARD_STREAM
    if to_output and parsed.json:
        raise ValueError(
            "--trace: expected a file alongside --json, got standard output"
        )
    console = None if parsed.json or to_output else output.console()
    plan = files.read_plan(parsed.plan)
    profile = files.read_profile(parsed.profile)
    cluster = files.read_cluster(parsed.cluster)
    simulation = simulate(plan, profile, cluster, steps=parsed.steps)
    if parsed.trace is not None:
        files.write_text(parsed.trace, simulation.trace())
    if to_output:
        return output.OK
    notes = (*hash_notes(plan, profile, cluster), *_unfit(simulation, cluster))
    if console is None:
        output.print_json({**simulation.to_dict(), "notes": list(notes)})
    else:
        _print(console, plan, simulation, notes)
    return output.OK


def _print(
    console: Console, plan: Plan, simulation: Simulation, notes: tuple[str, ...]
) -> None:
    from pipetransformer.explanation import report as sections

    drawing.draw(console, [sections.simulated(plan, simulation, notes)])
    drawing.draw_grid(console, simulation)


def _unfit(simulation: Simulation, cluster: Cluster) -> list[str]:
    """Say which stages take more than a device has."""
    most = cluster.device_memory_bytes
    return [
        f"note: stage {stage} does not fit: {peak / 1e6:.1f} of {most / 1e6:.1f} MB"
        for stage, peak in enumerate(simulation.peak_bytes_per_stage)
        if peak > most
    ]
