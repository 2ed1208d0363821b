"""Tables and schedules on consoles of all widths: nothing of them is lost."""

import collections
import io
import itertools

import pytest
import rich.console
import rich.table

from pipetransformer.cli import checks, doctor, drawing
from pipetransformer.explanation import Section, Table
from pipetransformer.explanation.document import columns
from tests.cli.model_files import files

__all__ = ["files"]

LOST = "equal step time: ties go to fewer stages, then fewer micro-batches"
CANDIDATES = Table(
    columns("K, cuts, estimate, simulated, lost because", cuts="word", lost="text"),
    (("1", "0 8", "1.591", "15606.653", "chosen"), ("16", "0 4 8", "2.5", "-", LOST)),
    marked=0,
)


def drawn(draw, width, *, terminal=False):
    """Return the lines that a function draws on a console of a width."""
    file = io.StringIO()
    console = rich.console.Console(
        file=file, width=width, force_terminal=terminal, color_system=None
    )
    draw(console)
    return file.getvalue().splitlines()


def letters(texts):
    return collections.Counter(x for x in "".join(texts) if x not in " ─━")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_keeps_every_letter_at_every_width(terminal):
    cells = [*(c.name for c in CANDIDATES.columns), *itertools.chain(*CANDIDATES.rows)]
    for width in range(1, 140):
        lines = drawn(
            lambda console: drawing.draw(console, [Section("", (), CANDIDATES)]),
            width,
            terminal=terminal,
        )
        assert letters(lines) == letters(cells), width
        assert all(line == line.rstrip() for line in lines)


def test_a_table_that_does_not_fit_has_a_line_for_each_row():
    lines = drawn(
        lambda console: drawing.draw(console, [Section("", (), CANDIDATES)]), 40
    )
    assert [line.split(maxsplit=1)[0] for line in lines[2:]] == ["1", "16"]
    assert lines[3].endswith(LOST)


def test_a_table_that_fits_stays_within_the_console():
    for width in (60, 80):
        lines = drawn(
            lambda console: drawing.draw(console, [Section("", (), CANDIDATES)]), width
        )
        assert max(map(len, lines)) <= width and len(lines) > 4
        assert any("micro-batches" in line for line in lines)


def test_tables_of_other_commands_keep_every_letter_too():
    path = "/scratch/" + "x" * 100
    found = [checks.Finding("shared memory", checks.NOTE, path, f"look at {path}")]
    for width in range(1, 140):
        lines = drawn(
            lambda console: drawing.print_table(console, doctor._table(found)), width
        )
        expected = letters(["note", "shared memory", path, "->", f"look at {path}"])
        assert letters(lines) == expected, width


@pytest.mark.parametrize("width", [10, 40, 60, 80])
def test_numbers_of_a_plan_are_whole_at_every_width(files, monkeypatch, width):
    def rows_of(out, title):
        lines = out.partition(f"\n{title}")[2].splitlines()
        return [line.split() for line in itertools.takewhile(bool, lines[3:])]

    path = files.plan("--num-stages", 4)
    monkeypatch.setenv("COLUMNS", "300")
    _, wide, _ = files.run("explain", path, *files.model)
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = files.run("explain", path, *files.model)
    assert (code, err) == (0, "")
    stages = rows_of(wide, "Stages")
    assert len(stages) == 4
    for row in stages:
        assert any(line.split() == row for line in out.splitlines())


def test_a_schedule_is_drawn_whole_on_a_narrow_console(files, monkeypatch):
    path = files.plan("--num-stages", 2)
    monkeypatch.setenv("COLUMNS", "12")
    code, out, _ = files.run("simulate", "--plan", path, *files.model)
    rows = [line for line in out.splitlines() if line.startswith("stage ")]
    cells = [line for line in rows if "F" in line]
    assert code == 0 and len(cells) == 2
    assert len({len(line) for line in cells}) == 1 and len(cells[0]) > 12
