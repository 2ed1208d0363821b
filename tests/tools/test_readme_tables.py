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


def test_result_that_no_table_shows_is_refused(page, capsys):
    page.readme.write_text("text\n")
    assert page.run("--check") == 1
    assert "speed.json: expected a table in the README, got none" in (
        capsys.readouterr().out
    )
    page.result.unlink()
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
        (MARKED.format("pie", ""), "speed pie: expected a table of accuracy, bounds"),
    ],
)
def test_marker_that_makes_no_table_is_refused(page, capsys, text, complaint):
    page.readme.write_text(text)
    assert page.run() == 1
    assert complaint in capsys.readouterr().out
    assert page.readme.read_text() == text


def paced(system, metric, *values):
    return {
        **ROW,
        "system": system,
        "metric": metric,
        "values": values,
        "median": sorted(values)[len(values) // 2],
        "min": min(values),
        "max": max(values),
    }


def against(name, value, low, high):
    return {**RATIO, "name": name, "value": value, "min": low, "max": high}


TABLE1 = {
    "rows": [
        paced("static-pipe", "no-cap wall time", 30, 31, 32),
        paced("ddp", "no-cap wall time", 20, 21, 22),
        paced("full", "no-cap wall time", 10, 10.5, 11),
        paced("static-pipe", "cap wall time", 40, 41, 42),
        paced("full", "cap wall time", 12, 13, 14),
    ],
    "ratios": [
        against("no-cap ddp / static-pipe", 1.476, 1.4, 1.5),
        against("no-cap full / static-pipe", 2.95, 2.9, 3.0),
        against("no-cap full / ddp", 2.0, 1.9, 2.1),
        against("cap full / static-pipe", 3.154, 3.0, 3.3),
    ],
    "settings": {
        "no-cap": {"bounds": {"static-pipe": 4.0, "ddp": 2.5}, "does_not_fit": []},
        "cap": {"bounds": {"static-pipe": 3.5}, "does_not_fit": ["ddp"]},
    },
}


def test_table1_has_both_settings_side_by_side(page):
    page.save(**TABLE1)
    page.mark("table1")
    assert page.run() == 0
    text = page.readme.read_text()
    assert "| static-pipe | 31 (30 to 32) | 1.00 | 41 (40 to 42) | 1.00 |" in text
    assert "| ddp | 21 (20 to 22) | 1.48 | does not fit | - |" in text
    assert "| full | 10.5 (10 to 11) | 2.95 | 13 (12 to 14) | 3.15 |" in text


def test_bounds_give_the_share_that_was_reached(page):
    page.save(**TABLE1)
    page.mark("bounds")
    assert page.run() == 0
    text = page.readme.read_text()
    assert "| full over ddp, no-cap | 2.00 (1.90 to 2.10) | 2.50 | 80% |" in text
    assert "| full over static-pipe, cap | 3.15 (3.00 to 3.30) | 3.50 | 90% |" in text


def test_accuracy_shows_each_seed_and_the_test(page):
    test = {
        "differences": [-0.14, 0.0, 0.28],
        "mean": 0.0467,
        "lower_limit": -0.31,
        "passes": False,
    }
    page.save(
        accuracy={"alpha 1/3": test}, ratios=[against("alpha 1/3 / unfrozen", 3, 2, 4)]
    )
    page.mark("accuracy")
    assert page.run() == 0
    told = "| alpha 1/3 | 3.00 | -0.14, +0.00, +0.28 | +0.05 | -0.31 (fails) |"
    assert told in page.readme.read_text()


def test_too_few_repeats_are_refused(page, capsys):
    page.save(rows=[{**ROW, "values": [12.0, 13.0]}])
    page.mark("rows")
    assert page.run() == 1
    assert "expected 3 repeats without failure, got 0 failed, 2 clean" in (
        capsys.readouterr().out
    )
