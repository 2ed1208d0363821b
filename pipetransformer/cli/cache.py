"""``pipetransformer cache``: the files of activations that runs have kept."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipetransformer.cli import arguments, drawing, output

if TYPE_CHECKING:
    from pipetransformer.autocache import CacheFile


def add_parser(subparsers: arguments.Subparsers) -> None:
    """Add the command."""
    cache = subparsers.add_parser(
        "cache",
        help="list, check and delete activations that runs have kept",
        description="Works on the folder of CacheConfig(directory=...).",
    )
    commands = cache.add_subparsers(metavar="COMMAND", required=True)
    for name, run, summary, description in (
        ("ls", _list, "list the files", "Lists what each file says of itself."),
        (
            "verify",
            _verify,
            "read all records and compare their checksums",
            "Reads each file whole. Exit code 1: one is damaged or cannot be used; "
            "runs pass over what is.",
        ),
        (
            "rm",
            _remove,
            "delete the files",
            "Deletes the files of activations in the folder, and nothing else. A run "
            "that is in progress loses nothing that it uses.",
        ),
    ):
        parser = arguments.add_command(
            commands,
            name,
            run,
            summary=summary,
            description=description,
            examples=f"pipetransformer cache {name} activations",
        )
        parser.add_argument("folder", metavar="DIR")
        if name == "rm":
            parser.add_argument(
                "--keep",
                type=arguments.index,
                default=0,
                metavar="N",
                help="leave the N files that were written last",
            )


def _list(given: argparse.Namespace) -> int:
    _print(given, [_row(file) for file in _files(given)])
    return output.OK


def _verify(given: argparse.Namespace) -> int:
    from pipetransformer.autocache import damaged_records

    rows = []
    for file in _files(given):
        row = _row(file)
        if file.head is not None:
            damaged = damaged_records(file.path)
            if damaged:
                row["problem"] = f"{damaged} records are damaged"
        rows.append(row)
    _print(given, rows)
    return output.NEGATIVE if any(row["problem"] for row in rows) else output.OK


def _remove(given: argparse.Namespace) -> int:
    files = [file for file in _files(given) if not file.path.is_dir()]
    files.sort(key=lambda file: file.path.lstat().st_mtime_ns, reverse=True)
    rows = []
    for file in files[given.keep :]:
        rows.append(_row(file))
        file.path.unlink()
    _print(given, rows)
    return output.OK


def _files(given: argparse.Namespace) -> Sequence[CacheFile]:
    from pipetransformer.autocache import cache_files

    if not given.json:
        output.console()  # says what is missing before files are read or deleted
    return cache_files(given.folder)


def _row(file: CacheFile) -> dict[str, Any]:
    written = datetime.datetime.fromtimestamp(file.path.lstat().st_mtime)
    return {
        "file": file.path.name,
        "written": written.isoformat(" ", "seconds"),
        **({} if file.head is None else dataclasses.asdict(file.head)),
        "problem": file.problem,
    }


def _print(given: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    if given.json:
        output.print_json({"version": 1, "files": list(rows)})
        return
    from rich.table import Table
    from rich.text import Text

    from pipetransformer.core.wire import printable

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("set", "records", "samples", "MB", "written", "file"):
        table.add_column(name, no_wrap=name not in ("set", "file"))
    for row in rows:
        file = Text(printable(row["file"]))
        if row["problem"]:
            file.append(f"\n-> {row['problem']}", style="italic")
        cells = [""] * 4
        if "space" in row:
            size = f"{row['file_bytes'] / 1e6:.1f}"
            cells = [row["space"], str(row["records"]), str(row["samples"]), size]
        table.add_row(*map(Text, [*cells, row["written"]]), file)
    drawing.print_table(output.console(), table)
