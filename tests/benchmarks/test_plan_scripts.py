"""Each script about plans runs to its end, and its table can be rendered."""

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

import fig11_microbatches
import simulator_accuracy
from fig11_microbatches import best_of, choice_ratios, counts_of
from harness import timing
from harness.common import Row
from pipe.encoder import Shape
from pipetransformer import planner
from simulated import waits
from simulated.accuracy import ALL, Error, summaries
from simulated.steps import Case
from simulated.trials import Compared, Subject
from simulated.waits import MIXES
from tests.benchmarks.test_simulated import layer, profile

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from readme_tables import TABLES


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    # No repeat counts as disturbed: a test must not depend on what else runs.
    monkeypatch.setattr(timing, "MIN_BUSY_CORES", float("inf"))
    monkeypatch.setattr(waits, "LEAST_S", 1e-4)
    monkeypatch.setattr(waits, "MOST_S", 2e-4)
    tiny = Shape(blocks=2, width=8, heads=1, tokens=2, rows=8)
    for script in (simulator_accuracy, fig11_microbatches):
        monkeypatch.setattr(script, "SHAPE", tiny)


def run(monkeypatch, tmp_path, script, *flags):
    name = script.__name__
    path = tmp_path / f"{name}.json"
    monkeypatch.setattr(sys, "argv", [name, "--repeats=3", f"--json={path}", *flags])
    assert script.main() == 0
    content = json.loads(path.read_text())
    assert content["name"] == name
    return content


def test_simulator_accuracy_writes_what_its_table_needs(monkeypatch, tmp_path, capsys):
    flags = ["--lengths", "2", "--per-length=3"]
    content = run(monkeypatch, tmp_path, simulator_accuracy, *flags)
    rendered = "\n".join(TABLES["simulator"](content))
    assert "| all | 5 | 21 |" in rendered
    assert "| heterogeneous | 1 | 3 |" in rendered
    assert "| half-frozen, zb-h1, always | 1 | 1 |" in rendered
    assert "| compute K=2, gpipe, never | 1 | 3 |" in rendered
    cases = [row for row in content["rows"] if row["values_of"] == "repeats"]
    assert len(cases) == 2 * 21
    assert len({row["system"] for row in cases}) == 21
    printed = capsys.readouterr().out
    for group in (ALL, *MIXES, "compute K=1", "compute K=2"):
        for figure, aim in (("median error", "aim 3%"), ("worst error", "aim 10%")):
            (line,) = (
                line
                for line in printed.splitlines()
                if line.startswith(f"{group}: {figure} ")
            )
            assert aim in line


def test_all_kinds_are_run_by_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulator_accuracy"])
    monkeypatch.setattr(
        simulator_accuracy,
        "computing_subjects",
        lambda shape, slots, steps: [a_subject(f"compute K={k}") for k in slots],
    )
    found = simulator_accuracy.subjects(simulator_accuracy.parse_args())
    kinds = Counter(subject.kind for subject in found)
    assert set(kinds) == {*MIXES, "compute K=1", "compute K=2"}
    assert all(kinds[mix] >= 7 for mix in MIXES)
    for mix in MIXES:  # with and without recomputation, under every schedule
        ways = {
            (case.schedule, case.checkpoint)
            for subject in found
            if subject.kind == mix
            for case in subject.cases
        }
        assert len(ways) == 6


def a_subject(kind):
    return Subject(kind, kind, None, [0], [0], None, (), None)


def an_error(kind, value):
    return Error(kind, kind, kind, "gpipe", "never", 2, 2, 1.0, value)


def test_missed_accuracy_is_told_in_its_row():
    found = [an_error("waits", 0.01), an_error("waits", -0.02)]
    found += [an_error("computes", -0.12)]
    rows = [
        {
            "system": row.system,
            "metric": row.metric,
            "met": row.target.judged({"median": row.median, "max": max(row.values)})[
                "met"
            ],
        }
        for row in simulator_accuracy.summary_rows(found)
    ]
    summaries_ = [asdict(each) for each in summaries(found)]
    lines = TABLES["simulator"]({"rows": rows, "summaries": summaries_})[2:]
    assert "| all | 2 | 3 | 2.0% | 12.0% **missed** | -2.0% |" in lines
    assert "| waits | 1 | 2 | 1.5% | 2.0% | -0.5% |" in lines
    assert (
        "| computes | 1 | 1 | 12.0% **missed** | 12.0% **missed** | -12.0% |" in lines
    )


def test_planners_choice_that_is_too_slow_is_told_in_its_row():
    found = [compared(2, 2.2, 2.2, 2.1), compared(4, 2.0, 2.0, 2.0)]
    (slow,) = choice_ratios(found, {2: 2}, quick=False)
    (same,) = choice_ratios(found, {2: 4}, quick=False)
    verdicts = [r.target.judged({"value": r.value})["met"] for r in (slow, same)]
    assert verdicts == [False, True]


def test_figure_11_writes_what_its_table_needs(monkeypatch, tmp_path, capsys):
    content = run(monkeypatch, tmp_path, fig11_microbatches)
    rendered = TABLES["microbatches"](content)
    cells = [line.split(" | ")[0] for line in rendered[2:]]
    counts = [(1, m) for m in range(1, 7)] + [(2, m) for m in (2, 4, 6, 8)]
    assert cells == [f"| K={k} M={m}" for k, m in counts]
    # One each for K=1 and K=2, whether the planner chose it or another.
    marks = [line.split(" | ")[-1].split(",")[0].rstrip(" |") for line in rendered[2:]]
    assert marks.count("best") == 2
    told = [line for line in rendered[2:] if "planner: " in line]
    assert len(told) == 2 and all(" of the best |" in line for line in told)
    assert len(content["ratios"]) == 2
    for ratio, line in zip(content["ratios"], told, strict=True):
        assert ratio["target"] == {"at_most": 1.03, "of": "value"}
        assert ("**missed**" in line) is (ratio["value"] > 1.03)
    assert "K=2: planner's M=" in capsys.readouterr().out


def test_counts_are_those_that_the_planner_tries():
    two = profile(layer(2, 2, 2), layer(2, 2, 2))
    plan = planner.search(
        two,
        planner.Cluster(devices_per_node=2, device_memory_bytes=2**40),
        global_batch=32,
        num_stages=2,
    )
    tried = {candidate.num_microbatches for candidate in plan.candidates}
    assert tried == set(counts_of(2, 32))
    assert counts_of(2, 7) == [2, 4, 6]


def compared(count, *values):
    row = Row(f"K=2 M={count}", "step time", "s", values)
    return Compared(Case((0, 1, 2), count, "gpipe"), row, row)


def test_best_count_is_that_of_the_shortest_median():
    found = [compared(2, 1.0, 3.0, 9.0), compared(4, 2.0, 2.0, 2.5), compared(6)]
    assert best_of(found, 2) == 4
    assert best_of(found, 1) == 0


def test_choice_is_compared_with_the_best_repeat_by_repeat():
    found = [compared(2, 2.2, 2.2, 2.1), compared(4, 2.0, 2.0, 2.0)]
    (ratio,) = choice_ratios(found, {2: 2}, quick=False)
    assert ratio.value == pytest.approx(1.1)
    assert ratio.name == "K=2: planner's M=2 / best M=4"
    (same,) = choice_ratios(found, {2: 4}, quick=False)
    assert (same.min, same.value, same.max) == (1, 1, 1)
