"""The cases that are timed give plans, and the growth is taken pair by pair."""

import json
import sys
from pathlib import Path

import pytest

import planner_time
from harness.common import Row
from pipetransformer.planner import InfeasiblePlan, search
from planner import cases
from planner.cases import random_cluster, random_profile

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from readme_tables import TABLES


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cases, "SOLVER_SIZES", ((40, 4), (80, 4)))
    monkeypatch.setattr(cases, "SWEEP_LAYERS", (8, 12))
    monkeypatch.setattr(cases, "MOST_STAGES", 4)
    monkeypatch.setattr(cases, "DEVICES", (16,))


def test_every_case_gives_an_answer(small):
    found = cases.cases(0, quick=True)
    assert len(found) == 2 + 1 + 2 * 3 + 1 + 1
    for name, case in found.items():
        assert case(), name


def test_the_searched_model_does_not_fit_one_device_and_fits_a_node():
    profile = random_profile(20, seed=1)
    machines = random_cluster(8, 1, profile)
    with pytest.raises(InfeasiblePlan, match="K=1 does not fit"):
        search(profile, machines, global_batch=96, num_stages=1)
    assert search(profile, machines, global_batch=96).num_stages > 1
    assert profile == random_profile(20, seed=1)


def test_growth_is_the_ratio_of_paired_repeats():
    over, under = planner_time.GROWTH[0]
    rows = {
        over: Row(over, "processor_ms", "ms", (4.0, 9.0, 8.0)),
        under: Row(under, "processor_ms", "ms", (2.0, 3.0, 2.0)),
    }
    (found,) = planner_time.growth(rows, quick=False)
    assert found.value == 3.0 and (found.min, found.max) == (2.0, 4.0)
    assert found.better_than == over


def test_growth_leaves_out_what_was_not_timed():
    assert planner_time.growth({}, quick=False) == []


def test_targets_and_growth_name_cases():
    names = cases.cases(0, quick=False)
    assert set(cases.TARGETS_MS) <= set(names)
    assert {name for pair in planner_time.GROWTH for name in pair} <= set(names)


def test_script_writes_every_case(small, tmp_path, capsys):
    path = tmp_path / "time.json"
    assert planner_time.main(["--quick", "--repeats=1", f"--json={path}"]) == 0
    content = json.loads(path.read_text())
    assert content["name"] == "planner_time" and content["quick"]
    assert {row["metric"] for row in content["rows"]} == {"processor_ms"}
    assert all(row["median"] > 0 for row in content["rows"])
    assert "best cuts" in capsys.readouterr().out
    lines = TABLES["plan_times"](content)
    assert len(lines) == 2 + len(content["rows"])


def test_case_that_takes_too_long_is_told_in_its_row():
    name = "search, L=200 K=1..64"
    row = planner_time.judged(Row(name, "processor_ms", "ms", (290.0, 301.0, 400.0)))
    figures = {"median": row.median, "min": 290.0, "max": 400.0}
    content = {"system": name, **figures, **row.target.judged(figures)}
    line = TABLES["plan_times"]({"rows": [content]})[2]
    assert line == f"| {name} | 301 (290 to 400) **missed** | 300 |"
