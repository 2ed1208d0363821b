"""The command line's frame: help, exit codes, errors in one line, a fast start."""

import io
import subprocess
import sys
import types

import pytest

import pipetransformer
from pipetransformer.cli import main as cli
from pipetransformer.cli import output
from pipetransformer.cli.arguments import add_command

ESCAPED = "error: a\\x1b[2J\\x9bK\\u202eb: \u00e9\n"


def a_command(run):
    """A module with one command, ``act``, that calls ``run``."""

    def add_parser(subparsers):
        add_command(
            subparsers, "act", run, summary="s", description="d", examples="act --json"
        )

    return types.SimpleNamespace(add_parser=add_parser)


def raises(error):
    def run(arguments):
        raise error

    return run


def run_act(monkeypatch, run, *arguments):
    monkeypatch.setattr(cli, "_COMMANDS", (a_command(run),))
    return cli.main(["act", *arguments])


def python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        **options,
    )


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("cuts: expected\n 3"), 2, "error: cuts: expected 3\n"),
        (OSError(2, "No such file", "x"), 2, "error: [Errno 2] No such file: 'x'\n"),
        (ImportError("no torch"), 2, "error: no torch\n"),
        (ValueError(), 2, "error: ValueError\n"),
        (ValueError("a\x1b[2J\x9bK\u202eb: \u00e9"), 2, ESCAPED),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(monkeypatch, capsys, error, code, text):
    assert run_act(monkeypatch, raises(error)) == code
    captured = capsys.readouterr()
    assert captured.err == text and captured.out == ""


def test_a_bug_of_ours_is_not_swallowed(monkeypatch):
    with pytest.raises(RuntimeError, match="please report"):
        run_act(monkeypatch, raises(RuntimeError("please report")))


@pytest.mark.parametrize(
    ("errors", "told"),
    [("strict", rb"\u65e5"), ("surrogateescape", rb"\u65e5"), ("replace", b"?")],
)
def test_text_that_standard_output_cannot_encode_is_escaped_not_an_error(
    monkeypatch, errors, told
):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors=errors)
    monkeypatch.setattr(sys, "stdout", stream)
    assert run_act(monkeypatch, lambda arguments: print("日") or 0) == 0
    assert stream.buffer.getvalue() == told + b"\n"


def test_the_command_gives_the_exit_code_and_knows_json(monkeypatch):
    assert run_act(monkeypatch, lambda arguments: int(arguments.json)) == 0
    assert run_act(monkeypatch, lambda arguments: int(arguments.json), "--json") == 1


@pytest.mark.parametrize("arguments", [[], ["nope"], ["--nope"]])
def test_bad_arguments_are_one_error_line(capsys, arguments):
    assert cli.main(arguments) == output.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert "--help" in captured.err


def test_help_shows_examples_and_exit_codes(monkeypatch, capsys):
    assert run_act(monkeypatch, raises(RuntimeError()), "--help") == 0
    assert "examples:\n  act --json" in capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert "exit codes:\n  0 done" in capsys.readouterr().out


def test_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pipetransformer {pipetransformer.__version__}\n"


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("00", 80), ("60", 60)])
def test_a_width_of_zero_is_one_that_is_not_known(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "__stdout__", None)  # no terminal to ask
    assert output.console().width == width


_LONG_OUTPUT = """
import sys
from pipetransformer.cli import main, output

def json(arguments):
    for _ in range(100):
        output.print_json({str(i): i for i in range(10**3)})
    return 0

def text(arguments):
    console = output.console()
    for _ in range(100):
        console.print("x" * 10**4)
    return 0

class C:
    def add_parser(subparsers):
        for run in (json, text):
            main.arguments.add_command(
                subparsers, run.__name__, run, summary="", description="", examples=""
            )

main._COMMANDS = (C,)
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_reader_that_went_away_is_no_error(form):
    process = subprocess.Popen(
        [sys.executable, "-c", _LONG_OUTPUT, form],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=150) == output.BROKEN_PIPE
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(
    ("redirection", "form", "code"),
    [(">&-", "json", 141), (">&-", "text", 141), (">&- 2>&-", "nope", 2)],
)
def test_a_closed_stream_is_a_reader_that_went_away(redirection, form, code):
    script = f'exec "$@" {redirection}'
    result = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-c", _LONG_OUTPUT, form],
        stderr=subprocess.PIPE,
        timeout=150,
    )
    assert (result.returncode, result.stderr) == (code, b"")


def test_help_loads_no_torch():
    script = (
        "import sys; from pipetransformer.cli.main import main\n"
        "main(['--help']); assert 'torch' not in sys.modules\n"
    )
    result = python("-c", script)
    assert result.returncode == 0, result.stderr
    assert "COMMAND" in result.stdout


def test_the_package_runs_as_a_module():
    result = python("-m", "pipetransformer", "nope")
    assert result.returncode == output.BAD_INPUT
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr


def test_text_without_rich_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert run_act(monkeypatch, lambda arguments: bool(output.console())) == 2
    assert "pip install rich, or use --json" in capsys.readouterr().err


def test_public_names_are_imported_on_first_use():
    for name in pipetransformer.__all__:
        assert getattr(pipetransformer, name) is not None
        assert name in dir(pipetransformer)
    assert pipetransformer.planner.Plan is pipetransformer.Plan
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = pipetransformer.nope


def test_the_installed_program_and_the_extra_are_declared(request):
    root = request.config.rootpath
    project = (root / "pyproject.toml").read_text()
    assert 'pipetransformer = "pipetransformer.cli.main:main"' in project
    assert 'cli = { file = ["requirements/cli.txt"] }' in project
    wanted = (root / "requirements" / "cli.txt").read_text().splitlines()
    for_tests = (root / "requirements" / "dev.txt").read_text().splitlines()
    assert wanted and set(wanted) <= set(for_tests)
