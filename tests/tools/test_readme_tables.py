"""The tables of README and docs/results are those of the files, or the check fails."""

import json
import pathlib
import re

import pytest

import _headline
import readme_tables
from harness.age import Age
from harness.commands import Command
from readme_tables import main, wrapped

ROOT = pathlib.Path(__file__).resolve().parents[2]

MARKED = "before\n<!-- results: speed {} -->\n{}<!-- end results -->\nafter\n"
SPEED = Command("speed", ("benchmarks/speed.py", "--fast"), ("csrc",))
COMMIT = "0123456789" * 4
ROW = {
    "system": "a",
    "metric": "wall time",
    "unit": "s",
    "median": 12.345,
    "min": 12.0,
    "max": 1234.4,
    "repeats": 3,
    "values_of": "repeats",
    "values": [12.0, 12.345, 1234.4],
    "turns": [0, 1, 3],
    "samples": [],
    "dropped": [{"turn": 2, "value": 9.0, "why": "disturbed", "sample": None}],
    "failed": 0,
    "foreign_share": None,
    "target": None,
    "met": None,
}
RATIO = {
    "name": "b / a",
    "value": 2.9999,
    "min": 2.5,
    "max": 3.25,
    "repeats": 3,
    "better_than": "b",
    "bound": None,
    "target": None,
    "met": None,
}
MACHINE = {
    "cpu": "A 1",
    "cores": 2,
    "gpu": None,
    "torch": "2.13.0",
    "cuda": None,
    "python": "3.10.1",
    "os": "Linux",
    "compiler": "c++ 12",
    "flags": "-O2",
    "threads": 1,
}
ORIGIN = {
    "date": "2026-01-02",
    "commit": COMMIT,
    "dirty": False,
    "changed": [],
    "command": "python benchmarks/speed.py --fast --json benchmarks/results/speed.json",
    "foreign_share": 0.0123,
}
SOURCE = (
    "`speed.json`: 2026-01-02, 0123456, A 1, 2 cores of which others used 1.2%, "
    "torch 2.13.0."
)
UNCOUNTED = "cannot be counted: no git checkout"


class Page:
    """A README alongside its results."""

    def __init__(self, folder):
        self.readme = folder / "README.md"
        self.result = folder / "results" / "speed.json"
        self.result.parent.mkdir()
        self.content = {
            "name": "speed",
            **ORIGIN,
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
        return main([*flags, "--page", str(self.readme), "--results", folder])


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(readme_tables, "COMMANDS", {"speed": SPEED})
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)  # without git
    return Page(tmp_path)


def test_ratios_are_rendered_between_the_markers(page):
    assert page.run() == 0
    assert page.readme.read_text() == MARKED.format(
        "ratios",
        "\n| ratio | value | min to max | repeats |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| b / a | 3.00 | 2.50 to 3.25 | 3 |\n\n"
        f"{SOURCE}\n\n",
    )


def test_bounded_ratios_show_what_bounds_them_and_what_is_missed(page):
    aimed = {"target": {"at_least": 3.5, "of": "value"}, "met": False}
    low = {**RATIO, "bound": 4.0, **aimed}
    page.save(ratios=[low, {**RATIO, "name": "c / a", "bound": None}])
    page.mark("bounded")
    assert page.run() == 0
    assert (
        "| b / a | 3.00 (2.50 to 3.25) **missed** | 4.00 |\n"
        "| c / a | 3.00 (2.50 to 3.25) | - |\n"
    ) in page.readme.read_text()


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
    told, last = capsys.readouterr().out.splitlines()[-2:]
    assert told.startswith("speed.json: ") and told.endswith(UNCOUNTED)
    assert last == "readme_tables: 1 tables, 0 of them not measured"
    assert page.run() == 0
    assert page.readme.read_text() == before


def test_result_that_no_table_shows_is_refused(page, capsys):
    page.readme.write_text("text\n")
    assert page.run("--check") == 1
    assert "speed.json: expected a table on a page, got none" in (
        capsys.readouterr().out
    )
    page.result.unlink()
    assert page.run("--check") == 0
    told = "readme_tables: 0 tables, 0 of them not measured\n"
    assert capsys.readouterr().out == told


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


def test_figures_without_a_result_file_leave_the_readme(page, capsys):
    page.run()
    page.result.unlink()
    assert page.run("--check") == 1
    assert page.run() == 0
    line = "python benchmarks/speed.py --fast --json benchmarks/results/speed.json"
    told = f"\nNot measured on this version (`make bench`, `{line}`).\n\n"
    assert page.readme.read_text() == MARKED.format("ratios", told)
    capsys.readouterr()
    assert page.run("--check") == 0
    last = "readme_tables: 1 tables, 1 of them not measured\n"
    assert capsys.readouterr().out == last


def test_list_of_cases_goes_with_its_result_file(page, capsys):
    page.run()
    page.result.with_suffix(".md").write_text("cases\n")
    assert page.run("--check") == 0
    page.result.unlink()
    assert page.run() == 1
    assert "speed.md: expected a result file alongside it" in capsys.readouterr().out


def test_result_of_no_known_command_is_refused(page, capsys, monkeypatch):
    monkeypatch.setattr(readme_tables, "COMMANDS", {"other": SPEED})
    for left in ("the file", "the marker"):
        assert page.run() == 1, left
        assert "speed: expected a measurement of other" in capsys.readouterr().out
        page.result.unlink(missing_ok=True)


def without(entry, key):
    return {name: value for name, value in entry.items() if name != key}


DIRTY = {"dirty": True, "changed": ["csrc/a.cpp"]}
LATE = {**ROW, "target": {"at_most": 12.0, "of": "median"}}
GOOD_RATIO = {**RATIO, "target": {"at_least": 2.0, "of": "value"}, "met": True}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quick": True}, "expected quick false, got True"),
        ({"quick": None}, "expected quick false, got None"),
        ({"name": "other"}, "expected name speed, got other"),
        ({"commit": None}, "expected a commit, got None"),
        ({"commit": "0123456"}, "expected a commit, got 0123456"),
        (DIRTY, r"expected dirty false, got True \(csrc/a.cpp\)"),
        ({"dirty": None}, r"expected dirty false, got None \(no paths\)"),
        (
            {"command": "python benchmarks/speed.py --json x.json"},
            "expected the command `.*--fast.*`, got `.*x.json`",
        ),
        ({"command": None}, "expected the command .* got `None`"),
        ({"date": None}, "expected a date, got None"),
        ({"foreign_share": None}, "expected foreign_share, got None"),
        ({"foreign_share": None, "took_s": 1.5}, "expected foreign_share, got None"),
        ({"machine": None}, "machine: expected fields, got None"),
        ({"rows": None}, "expected rows, got None"),
        ({"ratios": None}, "expected ratios, got None"),
        ({"rows": [{**ROW, "failed": 1}]}, "a, wall time: .* got 1 failed, 3 clean"),
        ({"rows": [{**ROW, "values": []}]}, "got 0 failed, 0 clean"),
        ({"rows": [{**ROW, "values": [12.0, 13.0]}]}, "expected 3 repeats .* 2 clean"),
        ({"rows": [{**ROW, "median": 12.0}]}, "expected median 12.345, got 12.0"),
        ({"rows": [{**ROW, "max": 13.0}]}, "expected max 1234.4, got 13.0"),
        ({"rows": [{**ROW, "repeats": 9}]}, "as many repeats as values, got 9"),
        (
            {"rows": [{**ROW, "values_of": "ranks of one run"}]},
            "as many repeats as values, got 3",
        ),
        ({"rows": [{**ROW, "turns": [0]}]}, "a turn and a sample per value"),
        ({"rows": [{**ROW, "samples": [{}]}]}, "a turn and a sample per value"),
        ({"rows": [{**ROW, "dropped": 1}]}, "expected dropped, got 1"),
        (
            {"rows": [{**ROW, "dropped": [without(ROW["dropped"][0], "why")]}]},
            "a, wall time, dropped: expected why, got None",
        ),
        ({"rows": [{**LATE, "met": True}]}, "expected met False, got True"),
        ({"rows": [{**LATE, "met": None}]}, "expected met False, got None"),
        ({"ratios": [{**GOOD_RATIO, "met": False}]}, "expected met True, got False"),
        *(({"machine": without(MACHINE, key)}, f"expected {key}") for key in MACHINE),
        *(
            ({"machine": {**MACHINE, key: None}}, f"machine: expected {key}, got None")
            for key in MACHINE
            if key not in ("gpu", "cuda")
        ),
        *(({"rows": [without(ROW, key)]}, f"expected {key}") for key in ROW),
        *(({"ratios": [without(RATIO, key)]}, f"expected {key}") for key in RATIO),
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


def test_a_measurement_of_less_than_a_second_does_not_tell_what_others_used(page):
    page.save(foreign_share=None, took_s=0.23)
    assert page.run() == 0
    assert "(too short to tell what others used)" in page.readme.read_text()


@pytest.mark.parametrize("key", [*ORIGIN, "quick", "machine", "rows", "ratios"])
def test_result_without_a_field_is_refused(page, capsys, key):
    page.content = without(page.content, key)
    page.save()
    if key == "changed":  # says why a tree is dirty, which none is that is published
        assert page.run() == 0
        return
    assert page.run("--check") == 1
    assert f"{key}" in capsys.readouterr().out


def test_all_that_is_wrong_is_told_at_once(page, capsys):
    page.save(commit=None, **DIRTY)
    page.run()
    out = capsys.readouterr().out
    assert "expected a commit" in out and "expected dirty false" in out


def test_result_of_another_history_is_refused(page, capsys, monkeypatch):
    gone = Age(None, f"expected a commit of this history, got {COMMIT}", True)
    monkeypatch.setattr(readme_tables, "age", lambda *_: gone)
    assert page.run("--check") == 1
    assert "expected a commit of this history" in capsys.readouterr().out


def test_newer_commits_are_counted_by_the_paths_that_were_measured(
    page, capsys, monkeypatch
):
    asked = []

    def age(*question):
        asked.append(question)
        return Age(3)

    monkeypatch.setattr(readme_tables, "age", age)
    assert page.run() == 0
    assert "speed.json: 3 newer commits to what it measures" in capsys.readouterr().out
    assert {*asked} == {(readme_tables.ROOT, COMMIT, ("csrc",))}


def test_values_that_are_no_repeats_are_named(page):
    page.save(rows=[{**ROW, "repeats": 1, "values_of": "ranks of one run"}])
    assert page.run() == 0
    told = f"{SOURCE} Ranges are over ranks of one run."
    assert told in page.readme.read_text().replace("\n", " ")


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
        (MARKED.format("pie", ""), "speed pie: expected a table of accuracy, bounded"),
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
        "values": list(values),
        "median": sorted(values)[len(values) // 2],
        "min": min(values),
        "max": max(values),
    }


def against(name, value, low, high, bound=None, target=None):
    aim = {"at_least": target, "of": "value"} if target else None
    return {
        **RATIO,
        "name": name,
        "value": value,
        "min": low,
        "max": high,
        "bound": bound,
        "target": aim,
        "met": value >= target if target else None,
    }


def epochs(*plans):
    return [{"plans": [list(plan)]} for plan in plans]


TABLE1 = {
    "rows": [
        paced("static-pipe", "no-cap wall time", 30, 31, 32),
        paced("ddp", "no-cap wall time", 20, 21, 22),
        paced("best-static", "no-cap wall time", 20, 21, 22),
        paced("full", "no-cap wall time", 10, 10.5, 11),
        paced("static-pipe again", "no-cap wall time", 30, 31, 32),
        paced("static-pipe", "cap wall time", 40, 41, 42),
        paced("full", "cap wall time", 12, 13, 14),
    ],
    "ratios": [
        against("no-cap ddp / static-pipe", 1.476, 1.4, 1.5, bound=1.2),
        against("no-cap full / static-pipe", 2.95, 2.9, 3.0, bound=4.0, target=3.6),
        against("no-cap static-pipe again / static-pipe", 1.02, 0.97, 1.05),
        against("no-cap full / ddp", 2.0, 1.9, 2.1, bound=2.5),
        against("no-cap full / ddp+freeze+cache", 0.98, 0.9, 1.1),
        against("no-cap full, profile kept / ddp", 2.2, 2.1, 2.3, bound=2.5),
        against("no-cap freeze+pipe+dp / static-pipe", 1.9, 1.8, 2.0, bound=2.0),
        against("no-cap freeze+pipe+dp / ddp", 1.5, 1.4, 1.6, bound=1.7),
        against("cap full / static-pipe", 3.154, 3.0, 3.3, bound=3.5),
        against(
            "no-cap full / static-pipe without evaluation", 4.3, 4.1, 4.4, bound=4.2
        ),
        against("cap full / static-pipe without evaluation", 3.3, 3.1, 3.4, bound=3.6),
    ],
    "rounds": {"runs": [{"dropped": []}, {"dropped": ["ddp: busy"]}, {"dropped": []}]},
    "settings": {
        "no-cap": {
            "does_not_fit": [],
            "same_as": {},
            "throughput": {"full": epochs((1, 2, 1), (1, 2, 1))},
        },
        "cap": {
            "does_not_fit": ["ddp"],
            "same_as": {"best-static": "static-pipe"},
            "throughput": {"full": epochs((2, 1, 8), (1, 2, 1), (1, 2, 1))},
        },
    },
}
FAULT = "(above its bound {}: measurement at fault)"


def test_every_page_is_rendered_and_checked(page, tmp_path, capsys):
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    other = folder / "speed.md"
    other.write_text(MARKED.format("rows", ""))
    page.readme.write_text("no table\n")
    given = ("--results", str(page.result.parent))
    assert main(given) == 0
    assert "| system | wall time (s) | pause (s) |" in other.read_text()
    other.write_text(other.read_text().replace("12.35", "9.99"))
    capsys.readouterr()
    assert main(["--check", *given]) == 1
    assert f"--- {other}" in capsys.readouterr().out


def test_a_result_on_one_of_several_pages_is_shown(page, tmp_path):
    other = tmp_path / "other.md"
    other.write_text("no table\n")
    assert page.run("--page", str(other)) == 0
    assert other.read_text() == "no table\n"


def test_lines_that_are_no_tables_are_wrapped():
    words = "word " * 60
    lines = list(wrapped([words, f"| {words}|", ""]))
    assert lines[-2:] == [f"| {words}|", ""]
    assert max(map(len, lines[:-2])) <= 120 and " ".join(lines[:-2]) == words.strip()


def headline_of(page, monkeypatch, *questions):
    monkeypatch.setattr(_headline, "QUESTIONS", questions)
    monkeypatch.setattr(_headline, "NAMES", tuple(q.name for q in questions))
    page.readme.write_text(
        "<!-- results: headline -->\nold\n<!-- end results -->\n"
        + MARKED.format("rows", "")
    )
    assert page.run() == 0
    return page.readme.read_text().splitlines()


def test_headline_has_a_row_per_question_and_where_it_was_measured(page, monkeypatch):
    asked = _headline.Question("How fast?", "speed", "training", lambda _: ("1", "2"))
    lines = headline_of(page, monkeypatch, asked)
    assert lines[2:5] == [
        "| question | measured | aim | commit |",
        "| --- | --- | --- | --- |",
        "| [How fast?](docs/results/training.md) | 1 | 2 | `0123456` |",
    ]
    assert lines[6] == "Measured on A 1, no GPU, 2 cores, torch 2.13.0."


def test_headline_says_what_was_not_measured(page, monkeypatch):
    page.result.unlink()
    asked = _headline.Question("How fast?", "speed", "training", lambda _: ("1", "2"))
    told = "Not measured on this version (`python benchmarks/bench.py speed`)"
    lines = headline_of(page, monkeypatch, asked)
    assert f"| [How fast?](docs/results/training.md) | {told} | - | - |" in lines


def test_headline_alone_does_not_show_a_result(page, capsys):
    text = "<!-- results: headline -->\n<!-- end results -->\n"
    page.readme.write_text(text)
    for name in _headline.NAMES:
        readme_tables.COMMANDS[name] = SPEED
    assert page.run() == 1
    assert "speed.json: expected a table on a page, got none" in capsys.readouterr().out


def test_aims_of_all_files_are_drawn_and_show_no_result_by_themselves(page, capsys):
    aimed = {**RATIO, "target": {"at_least": 2.0, "of": "value"}, "met": True}
    page.save(ratios=[aimed])
    page.readme.write_text("<!-- results: targets -->\n<!-- end results -->\n")
    assert page.run() == 1
    assert "expected a table on a page" in capsys.readouterr().out
    page.mark("rows", "")
    text = page.readme.read_text()
    page.readme.write_text(f"<!-- results: targets -->\n<!-- end results -->\n{text}")
    assert page.run() == 0
    assert "| speed | ratio | ≥ 2 | 1 | none | 3 |" in page.readme.read_text()
    assert page.run("--check") == 0


def test_headline_without_an_end_is_refused(page, capsys):
    page.readme.write_text("<!-- results: headline -->\n" + MARKED.format("rows", ""))
    assert page.run() == 1
    assert "expected <!-- end results --> after it" in capsys.readouterr().out


def test_every_question_leads_to_a_page_that_shows_its_result():
    for question in _headline.QUESTIONS:
        page = ROOT / "docs" / "results" / f"{question.page}.md"
        assert f"<!-- results: {question.name} " in page.read_text(), question.text


def test_headline_says_that_a_target_is_missed():
    cells = _headline.against("no-cap", "static-pipe")(TABLE1)
    assert cells == (
        "2.95 (2.90 to 3.00) times as fast",
        "3.60 of a bound of 4.00 **missed**",
    )
    cells = _headline.against("no-cap", "ddp+freeze+cache")(TABLE1)
    assert cells[1] == "equal work: about 1"


def test_headline_takes_the_plan_that_is_the_best_static_one():
    cells = _headline.against("cap", "best-static")(TABLE1)
    assert cells == (
        "3.15 (3.00 to 3.30) times as fast",
        "- of a bound of 3.50",
    )


def test_headline_says_that_the_accuracy_test_fails():
    cells = _headline.accuracy({"accuracy": {"elastic": FAILS}})
    assert cells == (
        "+0.05 points over 3 seeds, 95 % lower limit -0.31",
        "above -0.3: **fails**",
    )
    passes = {**FAILS, "lower_limit": -0.29, "passes": False}
    assert _headline.accuracy({"accuracy": {"elastic": passes}})[1].endswith("passes")


def test_headline_counts_the_pairs_that_are_behind_the_rival():
    ratios = [
        {**against("gpipe M=2 / pipelining gpipe M=2", 0.98, 0.9, 1), "met": False},
        against("gpipe M=4 / pipelining gpipe M=4", 1.05, 1, 1.1, target=1.0),
        against("zb-h1 M=2 / pipelining 1f1b M=2", 1.2, 1, 1.3, target=1.0),
        against("gpipe M=2 / one thread", 1.5, 1, 2),
    ]
    assert _headline.pipelining({"ratios": ratios}) == (
        "gpipe: 0.98 to 1.05; zb-h1 over its 1f1b: 1.20 times as fast",
        "1, **missed** by 1 of 3",
    )


def test_headline_gives_the_pauses_of_the_demo_alone():
    rows = [
        paced("demo model, 4x1 -> 2x2", "pause", 40, 45, 50),
        paced("demo model, 2x2 -> 1x4", "pause", 50, 55, 60),
        paced("demo model, prepared ahead, 4x1 -> 2x2", "pause", 1, 2, 3),
        paced("100 M parameters, 2x1 -> 1x2", "pause", 500, 600, 700),
        {
            **paced("demo model, 4x1 -> 2x2", "without moved bytes", 1, 2, 3),
            "met": False,
        },
    ]
    assert _headline.pauses({"rows": rows}) == (
        "45 to 55 ms",
        "1 step besides the move, **missed** by 1 of 1",
    )


def test_headline_gives_the_slowest_error_of_a_killed_rank():
    aim = {"target": {"at_most": 100.0, "of": "max"}, "met": False}
    rows = [
        {**paced("killed, 2 processes", "last survivor", 30, 40, 50), "met": True},
        {**paced("killed, 8 processes", "last survivor", 70, 80, 109), **aim},
        paced("stopped, 8 processes", "last survivor", 1900, 2000, 2100),
    ]
    told = ("at most 109 ms", "100 ms **missed**")
    assert _headline.time_to_error({"rows": rows}) == told


def test_headline_adds_up_the_faults():
    rows = {"kill": {"attempts": 3, "failed": 0}, "stop": {"attempts": 2, "failed": 1}}
    told = ("1 of 5 ended otherwise than promised", "0 **missed**")
    assert _headline.faults({"summary": rows}) == told


def test_headline_gives_the_cost_of_a_step_by_case():
    aim = {"target": {"at_most": 200.0, "of": "median"}, "met": True}
    rows = [
        {**paced("one process", "above", 180, 190, 210), **aim},
        paced("one process", "engine", 900, 910, 920),
        paced("two replicas", "above", 280, 290, 310),
    ]
    told = ("one process: 190 us; two replicas: 290 us", "200, -")
    assert _headline.engine_step({"rows": rows}) == told


def rendered(page, kind, **content):
    page.save(**content)
    page.mark(kind)
    assert page.run() == 0
    return page.readme.read_text()


def test_table1_has_both_settings_side_by_side(page):
    text = rendered(page, "table1", **TABLE1)
    pipe = "| static-pipe | 31 (30 to 32) | 1.00 | 1.00 | 41 (40 to 42) | 1.00 | 1.00 |"
    assert pipe in text
    assert " | does not fit | - | - |" in text
    assert "| best-static | 21 (20 to 22) | - | - | as static-pipe | - | - |" in text
    assert "| 10.5 (10 to 11) | 2.95 | 4.30 " in text
    assert "| 13 (12 to 14) | 3.15 | 3.30 |" in text


def test_table1_says_how_its_columns_were_formed_and_what_means_nothing(page):
    text = rendered(page, "table1", **TABLE1)
    assert "medians of the 2 rounds that count (1 dropped as disturbed)" in text
    assert "same system once more: 1.02 (0.97 to 1.05). Nothing in the" in text


def test_a_ratio_above_its_bound_is_shown_as_a_fault_in_every_table(page):
    text = rendered(page, "table1", **TABLE1)
    assert f"| ddp | 21 (20 to 22) | 1.48 {FAULT.format('1.20')} |" in text
    assert text.count("measurement at fault") == 2  # and full's without evaluation
    for kind in ("bounds", "ratios"):
        assert f"4.30 {FAULT.format('4.20')}" in rendered(page, kind, **TABLE1)


def test_bounds_give_the_share_that_was_reached(page):
    text = rendered(page, "bounds", **TABLE1)
    assert "| full over ddp, no-cap | 2.00 (1.90 to 2.10) | 2.50 | 80% | - " in text
    kept = "| full, profile kept over ddp, no-cap | 2.20 (2.10 to 2.30) | 2.50 | 88% | "
    assert kept in text
    cap = "| 3.15 (3.00 to 3.30) | 3.50 | 90% | 3.30 (3.10 to 3.40) | 3.60 | 92% |"
    assert f"| full over static-pipe, cap {cap}" in text
    same = (
        "| full over ddp+freeze+cache, no-cap | 0.98 (0.90 to 1.10) | equal work | - "
    )
    assert same in text
    assert "| 2.95 (2.90 to 3.00) | 4.00 | 74%, **missed** (90%) |" in text
    assert "| 4.20 | - |" in text  # above it: no share


def test_bounds_tell_the_plans_and_what_is_left_without_a_cache(page):
    text = rendered(page, "bounds", **TABLE1)
    assert "no-cap 1 x 2 (2); cap 2 x 1 (1), then 1 x 2 (2)." in text
    assert "nothing can be cached: 1.90 over static-pipe, 1.50 over ddp." in text


FAILS = {
    "differences": [-0.14, 0.0, 0.28],
    "mean": 0.0467,
    "lower_limit": -0.31,
    "margin": 0.3,
    "passes": True,  # the limit decides
}


def test_accuracy_shows_each_seed_and_the_test(page):
    ratio = against("alpha 1/3 / unfrozen", 3, 2, 4, bound=2.9)
    text = rendered(page, "accuracy", accuracy={"alpha 1/3": FAILS}, ratios=[ratio])
    fault = FAULT.format("2.90")
    test = "-0.14, +0.00, +0.28 | +0.05 | -0.31 | 0.3: **fails** |"
    assert f"| alpha 1/3 | 3.00 {fault} | 2.90 | {test}" in text
    passes = {**FAILS, "lower_limit": -0.29}
    text = rendered(page, "accuracy", accuracy={"alpha 1/3": passes}, ratios=[ratio])
    assert "| -0.29 | 0.3: passes |" in text


def test_the_demo_shows_its_paired_test(page):
    demo = [
        paced(name, "final accuracy", 96, 96.5, 97) for name in ("elastic", "static")
    ]
    text = rendered(page, "paired", rows=demo, accuracy={"elastic": FAILS})
    test = "-0.14, +0.00, +0.28 | +0.05 | -0.31 | 0.3: **fails** |"
    assert f"| elastic | 96.5 (96 to 97) | {test}" in text
    assert "| static | 96.5 (96 to 97) | - | - | - | - |" in text
