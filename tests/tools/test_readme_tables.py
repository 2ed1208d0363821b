"""The README's tables are those of the result files, or the check fails."""

import json
import re

import pytest
from readme_tables import main

MARKED = "before\n<!-- results: speed {} -->\n{}<!-- end results -->\nafter\n"
ROW = {
    "system": "a",
    "metric": "wall time",
    "unit": "s",
    "median": 12.345,
    "min": 12.0,
    "max": 1234.4,
    "repeats": 3,
    "values": [12.0, 12.345, 1234.4],
    "dropped": 0,
    "failed": 0,
    "foreign_share": None,
}
RATIO = {
    "name": "b / a",
    "value": 2.9999,
    "min": 2.5,
    "max": 3.25,
    "repeats": 3,
    "better_than": "b",
}
MACHINE = {"cpu": "A 1", "cores": 2, "gpu": None, "torch": "2.13.0", "cuda": None}


class Page:
    """A README beside its results."""

    def __init__(self, folder):
        self.readme = folder / "README.md"
        self.result = folder / "speed.json"
        self.content = {
            "name": "speed",
            "date": "2026-01-02",
            "quick": False,
            "machine": MACHINE,
            "rows": [ROW, {**ROW, "system": "b"}, {**ROW, "metric": "pause"}],
            "ratios": [RATIO],
        }
        self.save()
        self.mark("ratios")

    def save(self, **changes):
        self.result.write_text(json.dumps({**self.content, **changes}))

    def mark(self, kind, old=""):
        self.readme.write_text(MARKED.format(kind, old))

    def run(self, *flags):
        folder = str(self.result.parent)
        return main([*flags, "--readme", str(self.readme), "--results", folder])


@pytest.fixture
def page(tmp_path):
    return Page(tmp_path)


def test_ratios_are_rendered_between_the_markers(page):
    assert page.run() == 0
    assert page.readme.read_text() == MARKED.format(
        "ratios",
        "\n| ratio | value | min to max | repeats |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| b / a | 3.00 | 2.50 to 3.25 | 3 |\n\n"
        "`speed.json`: 2026-01-02, A 1, 2 cores, torch 2.13.0.\n\n",
    )


def test_rows_are_rendered_by_system_and_metric(page):
    page.mark("rows")
    assert page.run() == 0
    lines = page.readme.read_text().splitlines()
    assert "| system | wall time (s) | pause (s) |" in lines
    assert f"| a |{' 12.35 (12 to 1,234) |' * 2}" in lines
    assert "| b | 12.35 (12 to 1,234) | - |" in lines


def test_rendered_readme_passes_the_check_and_stays(page, capsys):
    page.run()
    before = page.readme.read_text()
    assert page.run("--check") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "readme_tables: 1 tables"
    assert page.run() == 0
    assert page.readme.read_text() == before


def test_readme_without_markers_passes_with_no_tables(page, capsys):
    page.readme.write_text("text\n")
    assert page.run("--check") == 0
    assert capsys.readouterr().out == "readme_tables: 0 tables\n"


def test_check_shows_a_changed_number(page, capsys):
    page.run()
    page.save(ratios=[{**RATIO, "value": 2.0}])
    capsys.readouterr()
    assert page.run("--check") == 1
    out = capsys.readouterr().out.splitlines()
    assert "-| b / a | 3.00 | 2.50 to 3.25 | 3 |" in out
    assert "+| b / a | 2.00 | 2.50 to 3.25 | 3 |" in out


def test_check_shows_an_edited_table_and_writes_nothing(page, capsys):
    page.run()
    edited = page.readme.read_text().replace("3.00", "9.00")
    page.readme.write_text(edited)
    assert page.run("--check") == 1
    assert "-| b / a | 9.00 | 2.50 to 3.25 | 3 |" in capsys.readouterr().out
    assert page.readme.read_text() == edited


@pytest.mark.parametrize("flags", [(), ("--check",)])
def test_missing_result_file_is_refused(page, capsys, flags):
    page.result.unlink()
    assert page.run(*flags) == 1
    assert "speed.json: expected a result file, got none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quick": True}, "expected quick false, got True"),
        ({"quick": None}, "expected quick false, got None"),
        ({"name": "other"}, "expected name speed, got other"),
        ({"rows": [{**ROW, "failed": 1}]}, "a, wall time: .* got 1 failed, 3 clean"),
        ({"rows": [{**ROW, "values": []}]}, "got 0 failed, 0 clean"),
    ],
)
def test_result_not_fit_for_publication_is_refused(page, capsys, changes, text):
    page.run()
    before = page.readme.read_text()
    page.save(**changes)
    for flags in ((), ("--check",)):
        capsys.readouterr()
        assert page.run(*flags) == 1
        assert re.search(text, capsys.readouterr().out)
    assert page.readme.read_text() == before


def test_result_that_is_no_json_is_refused(page, capsys):
    page.result.write_text("{")
    assert page.run("--check") == 1
    assert "speed.json: expected JSON, got" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- results: speed ratios -->\n", "expected <!-- end results --> after it"),
        ("<!-- end results -->\n", "expected a start marker before it, got none"),
        (
            "<!-- results: speed rows -->\n" + MARKED.format("ratios", ""),
            "<!-- results: speed rows -->: expected <!-- end results --> after it",
        ),
        (MARKED.format("pie", ""), "speed pie: expected a table of ratios, rows"),
    ],
)
def test_marker_that_makes_no_table_is_refused(page, capsys, text, complaint):
    page.readme.write_text(text)
    assert page.run() == 1
    assert complaint in capsys.readouterr().out
    assert page.readme.read_text() == text
