"""``pipetransformer plan``: the fastest pipeline for a profile and a cluster."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from pipetransformer.cli import arguments, drawing, files, output

if TYPE_CHECKING:
    from rich.console import Console

    from pipetransformer.explanation import Section
    from pipetransformer.planner import Cluster, InfeasiblePlan, Plan, Profile

_SCHEDULES = ("gpipe", "1f1b", "zb-h1")
_PLACEMENTS = ("replicated", "pipelined", "filled")
_REMAINING_STEPS = 1000
_NOT_THE_ENGINES = (
    "Pipe(loss=...) runs this schedule; the engine with PipeConfig(schedule=...)"
)
_EXAMPLES = """
pipetransformer plan --profile p.json --cluster c.json --global-batch 32
pipetransformer plan --profile p.json --cluster c.json --global-batch 32 --json
pipetransformer plan --profile p.json --cluster c.json --global-batch 32 \\
    --output plan.json
pipetransformer plan --profile p.json --cluster c.json --global-batch 32 \\
    --frozen 8 --current plan.json --remaining-steps 500
"""


def add_parser(subparsers: arguments.Subparsers) -> None:
    """Add the command."""
    parser = arguments.add_command(
        subparsers,
        "plan",
        run,
        summary="find the fastest pipeline",
        description=(
            "Searches stages, replicas, micro-batches, cuts, schedule, prefix "
            "placement and cache tier for the shortest step within the devices' "
            "memory. Exit code 1: nothing fits."
        ),
        examples=_EXAMPLES,
    )
    add = parser.add_argument
    add("--profile", required=True, metavar="FILE", help="costs of the layers, JSON")
    add("--cluster", required=True, metavar="FILE", help="the machines, JSON")
    add(
        "--global-batch",
        required=True,
        type=arguments.count,
        metavar="N",
        help="rows of a batch over all replicas",
    )
    add(
        "--accumulation-steps",
        type=arguments.count,
        metavar="N",
        help="batches that share an optimizer step, of which the last one's gradients "
        "are reduced (default 1, or as --current); times are of one batch, the mean",
    )
    add(
        "--frozen",
        type=arguments.index,
        default=0,
        metavar="BOUNDARY",
        help="layers before this one are frozen (default 0)",
    )
    add("--num-stages", type=arguments.count, metavar="K", help="keep K stages")
    add(
        "--max-replicas",
        type=arguments.count,
        metavar="R",
        help="at most R replicas (default: what the devices hold)",
    )
    add(
        "--replicas",
        choices=("auto", "all"),
        default="auto",
        help="auto: those with the shortest step, so devices may stay idle; all: as "
        "many as there may be (default auto)",
    )
    add(
        "--num-microbatches",
        type=arguments.count,
        metavar="M",
        help="keep M micro-batches",
    )
    add(
        "--schedule",
        choices=(*_SCHEDULES, "auto"),
        default="auto",
        help="order of the cells (default auto: the fastest; Pipe(loss=...) runs all "
        "three, the engine that of PipeConfig.schedule)",
    )
    add(
        "--checkpoint",
        choices=("never", "except_last", "always"),
        default="never",
        help="micro-batches that are computed again before backward (default never)",
    )
    add(
        "--prefix",
        choices=("auto", *_PLACEMENTS),
        default="auto",
        help="where frozen layers run (default auto: the fastest of replicated and "
        "pipelined; of replicated and filled where slots share a host, which the "
        "cluster file shows by the replicas' link or by cores)",
    )
    add(
        "--num-samples",
        type=arguments.count,
        metavar="N",
        help="samples of the data set: how much a cache can serve; also lets frozen "
        "outputs be cached on the devices",
    )
    add("--current", metavar="PLAN", help="plan in force; the change is priced")
    add(
        "--remaining-steps",
        type=arguments.index,
        metavar="S",
        help="steps, of one batch each, left to gain from a change of --current "
        f"(default {_REMAINING_STEPS})",
    )
    add(
        "--output",
        type=arguments.file_name,
        metavar="FILE",
        help="also write the plan to a file, JSON; - prints it alone",
    )


def run(parsed: argparse.Namespace) -> int:
    """Plan, write, print."""
    from pipetransformer.planner import InfeasiblePlan

    to_output = parsed.output == files.STANDARD_STREAM
    console = None if parsed.json or to_output else output.console()
    profile = files.read_profile(parsed.profile)
    cluster = files.read_cluster(parsed.cluster)
    try:
        plan = _make(parsed, profile, cluster)
    except InfeasiblePlan as refusal:
        return _refuse(parsed, refusal)
    if parsed.output is not None:
        files.write_text(parsed.output, plan.to_json())
    if console is None:
        if not to_output:
            output.print_json(plan.to_dict())
        return output.OK
    _print(console, plan, profile, cluster)
    return output.OK


def _make(parsed: argparse.Namespace, profile: Profile, cluster: Cluster) -> Plan:
    from pipetransformer import planner

    schedules = _SCHEDULES if parsed.schedule == "auto" else (parsed.schedule,)
    current = None if parsed.current is None else files.read_plan(parsed.current)
    shared = parsed.accumulation_steps
    if shared is None:
        shared = 1 if current is None else current.accumulation_steps
    options = planner.SearchOptions(
        global_batch=parsed.global_batch,
        num_stages=parsed.num_stages,
        max_replicas=parsed.max_replicas,
        replicas=parsed.replicas,
        num_microbatches=parsed.num_microbatches,
        checkpoint=parsed.checkpoint,
        schedules=schedules,
        prefix_placements=_placements(cluster, parsed.prefix),
        cache_tiers=_cache_tiers(cluster, parsed.frozen, parsed.num_samples),
        num_samples=parsed.num_samples,
        accumulation_steps=shared,
    )
    if current is None and parsed.remaining_steps is not None:
        raise ValueError("--remaining-steps: expected --current beside it, got none")
    if current is None:
        try:
            return planner.search(profile, cluster, options, boundary=parsed.frozen)
        except planner.InfeasiblePlan as error:
            fits = planner.what_would_fit(
                profile, cluster, options, boundary=parsed.frozen
            )
            raise error.hinting(fits) from None
    if current.cuts[-1] != len(profile.layers):
        raise ValueError(
            f"{parsed.current}: expected a plan of {len(profile.layers)} layers (the "
            f"profile's), got one of {current.cuts[-1]}"
        )
    remaining = parsed.remaining_steps
    if remaining is None:
        remaining = _REMAINING_STEPS
    return planner.replan(
        profile,
        cluster,
        options,
        planner.ChangeTerms(remaining_steps=remaining),
        current=current,
        boundary=parsed.frozen,
    )


def _placements(cluster: Cluster, asked: str) -> tuple[str, ...]:
    """Return where frozen layers may run; slots of a host as the engine has them."""
    if asked != "auto":
        return (asked,)
    on_host = cluster.replica_link_bytes_per_s is not None or cluster.cores_permille > 0
    return "replicated", "filled" if on_host else "pipelined"


def _cache_tiers(
    cluster: Cluster, boundary: int, num_samples: int | None
) -> tuple[str, ...]:
    tiers = ["none"]
    if boundary > 0 and num_samples is not None:  # devices hold a known number
        tiers.append("device")
    if boundary > 0 and cluster.cache is not None:
        if cluster.cache.host_bytes > 0:
            tiers.append("host")
        if cluster.cache.disk_bytes > 0:
            tiers.append("disk")
    return tuple(tiers)


def _refuse(parsed: argparse.Namespace, refusal: InfeasiblePlan) -> int:
    if parsed.json:
        output.print_json({"error": str(refusal), "refusals": list(refusal.refusals)})
    else:
        summary = str(refusal).partition("; ")[0]
        output.print_error(ValueError(summary if refusal.refusals else str(refusal)))
        sys.stderr.writelines(f"- {reason}\n" for reason in refusal.refusals)
        sys.stderr.write(f"- {refusal.hint}\n" if refusal.hint else "")
    return output.NEGATIVE


def _print(console: Console, plan: Plan, profile: Profile, cluster: Cluster) -> None:
    from pipetransformer.explanation import outcomes, outline
    from pipetransformer.explanation import report as sections
    from pipetransformer.simulator import simulate

    simulation = simulate(plan, profile, cluster)
    report = outline(plan, profile, cluster, simulation)
    drawing.draw(console, [_headline(plan), sections.stages(report)])
    drawing.draw_grid(console, simulation)
    rest = [
        sections.candidates(plan),
        sections.reasons(plan),
        outcomes.transition(plan),
    ]
    drawing.draw(console, rest)


def _headline(plan: Plan) -> Section:
    from pipetransformer.explanation import report as sections

    section = sections.headline(plan)
    if plan.schedule == "gpipe":
        return section
    return dataclasses.replace(section, lines=(*section.lines, _NOT_THE_ENGINES))
