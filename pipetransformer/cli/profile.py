"""``pipetransformer profile``: measures a model's layers and writes the profile."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from pipetransformer.cli import drawing, files, output, target
from pipetransformer.cli.arguments import (
    Subparsers,
    add_command,
    count,
    counts,
    file_name,
    threads,
)

if TYPE_CHECKING:
    from rich.table import Table

    from pipetransformer.planner import LayerProfile, Profile


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers,
        "profile",
        run,
        summary="measure what each layer of a model costs",
        description="Imports a model from the current directory, runs its layers "
        "forward and backward, and prints their times and bytes. The profile is "
        "written to FILE; with --json it is printed, too.",
        examples="""
            pipetransformer profile models:build_model --sample models:sample
            pipetransformer profile models:model_and_sample --output profile.json
            pipetransformer profile models:build_model --sample models:sample --json
        """,
    )
    add = parser.add_argument
    add(
        "target",
        metavar="MODULE:ATTR",
        help="an nn.Sequential, a pair of one and its sample, or a callable without "
        "arguments that returns either",
    )
    add(
        "--sample",
        metavar="MODULE:ATTR",
        help="inputs of the first layer: a tensor (rows, ...), a tuple of arguments, "
        "a dict of keywords, or a callable that returns one",
    )
    add(
        "--microbatch-samples",
        type=counts,
        default=(1, 4, 16),
        metavar="N,N,...",
        help="increasing micro-batch sizes; default 1,4,16",
    )
    add("--repeats", type=count, default=3, help="timed runs of a layer; default 3")
    add("--threads", type=threads, help="intra-op threads of a slot; default torch's")
    add("--name", help="of the model in the profile; default MODULE:ATTR")
    add(
        "--output",
        type=file_name,
        metavar="FILE",
        help="where the profile is written",
    )
    add(
        "--traceback",
        action="store_true",
        help="show where the model's own code failed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    as_json = arguments.json or arguments.output == files.STANDARD_STREAM
    console = None if as_json else output.console()
    profile, seconds = _measure(arguments)
    if arguments.output not in (None, files.STANDARD_STREAM):
        files.write_text(arguments.output, profile.to_json())
    took = (
        f"{len(profile.layers)} layers measured in {seconds:.2f} s with "
        f"{arguments.repeats} repeats"
    )
    if console is None:
        files.write_text(files.STANDARD_STREAM, profile.to_json())
        sys.stderr.write(took + "\n")
        return output.OK
    console.print(f"{profile.name}: {took}")
    drawing.print_table(console, _table(profile))
    if arguments.output is not None:
        console.print(f"written to {arguments.output}", soft_wrap=True)
    return output.OK


def _measure(arguments: argparse.Namespace) -> tuple[Profile, float]:
    """Return the profile, and the seconds that measuring it took."""
    import torch

    from pipetransformer import planner

    name = arguments.target
    found = target.load_target(
        name, arguments.sample, show_traceback=arguments.traceback
    )
    before = torch.get_num_threads()
    torch.set_num_threads(arguments.threads or before)
    started = time.perf_counter()
    try:
        code = f"{name} on its sample"
        with target.users_code(code, arguments.traceback, ours=(ValueError,)):
            profile = planner.profile(
                found.model,
                found.sample,
                microbatch_samples=arguments.microbatch_samples,
                repeats=arguments.repeats,
                name=arguments.name or name,
            )
    finally:
        torch.set_num_threads(before)
    return profile, time.perf_counter() - started


def _table(profile: Profile) -> Table:
    """Return one row per layer: times at each micro-batch size, and bytes."""
    from rich.table import Table

    triples = [triple for layer in profile.layers for triple in _times(layer)]
    long = max(max(triple) for triple in triples) >= 10_000_000
    unit, unit_ns = ("ms", 1_000_000) if long else ("us", 1000)
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=f"{unit} of forward/input gradient/weight gradient; bytes",
        title_justify="left",
        title_style="",
    )
    table.add_column("layer")
    for size in profile.microbatch_samples:
        rows = "1 row" if size == 1 else f"{size} rows"
        table.add_column(rows, justify="right", no_wrap=True)
    further = [_whatever_the_rows(layer) for layer in profile.layers]
    per_call = ("saved/call",) if any(further) else ()
    for heading in ("weights", "saved/row", *per_call, "out/row"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer, further_bytes in zip(profile.layers, further, strict=True):
        table.add_row(
            layer.name,
            *("/".join(_digits(ns / unit_ns) for ns in each) for each in _times(layer)),
            _bytes(layer.parameter_bytes),
            _bytes(layer.activation_bytes_per_sample),
            *([_bytes(further_bytes)] if per_call else []),
            _bytes(layer.boundary_bytes_per_sample),
        )
    return table


def _whatever_the_rows(layer: LayerProfile) -> int:
    return layer.activation_bytes_per_microbatch + layer.shared_activation_bytes


def _times(layer: LayerProfile) -> list[tuple[int, int, int]]:
    columns = layer.forward_ns, layer.input_grad_ns, layer.weight_grad_ns
    return list(zip(*columns, strict=True))


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _bytes(size: int) -> str:
    value: float = size
    for unit in ("", "K", "M", "G"):
        if value < 1000:
            return _digits(value) + unit
        value /= 1024
    return _digits(value) + "T"
