"""The command line's entry: picks the command, turns errors into exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

import pipetransformer
from pipetransformer.cli import (
    arguments,
    cache,
    cluster,
    doctor,
    explain,
    output,
    plan,
    profile,
    report,
    simulate,
)

# A command is a module with add_parser(subparsers); its parser's default `run` does
# the work. Modules import torch and the planner when they run: --help is instant.
_COMMANDS: tuple[ModuleType, ...] = (
    plan,
    simulate,
    explain,
    profile,
    cluster,
    report,
    cache,
    doctor,
)

_EXIT_CODES = """
0 done
1 a negative finding: no plan fits, something needed is missing
2 bad input: an argument, a file or one of its fields
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; default ``sys.argv[1:]``.

    Returns:
        The exit code: 0 done, 1 a negative finding, 2 bad input (one line
        ``error: ...`` on standard error).
    """
    output.open_streams()
    try:
        code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return output.INTERRUPTED
    except BrokenPipeError:
        output.drop_output()
        return output.BROKEN_PIPE
    except (ValueError, OSError, ImportError) as error:
        output.print_error(error)
        return output.BAD_INPUT
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        parsed = make_parser().parse_args(argv)
    except SystemExit:  # --help and --version
        return output.OK
    code: int = parsed.run(parsed)
    return code


def make_parser() -> arguments.Parser:
    """Return the parser of all commands."""
    parser = arguments.Parser(
        prog="pipetransformer",
        description="Plans pipelines from measured layer costs, and explains them.",
        epilog=arguments.indented("exit codes", _EXIT_CODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"pipetransformer {pipetransformer.__version__}",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser
