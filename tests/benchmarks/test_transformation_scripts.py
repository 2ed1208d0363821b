"""The scripts about transformations run, find nothing wrong, and judge what is."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

import endurance
import failure_time
import fault_injection
import transformation_curve as curve
import transition_time
from tests.support import fork_server
from transformations.curve_runs import CurveRun

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from readme_tables import TABLES


@pytest.fixture(scope="module", autouse=True)
def _server():
    """The tests' own server: there is one per process."""
    fork_server.context()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "arguments", "tables"),
    [
        (
            fault_injection,
            ["--only=in move: SIGKILL, member of 2", "--heartbeat=6", "--jobs=1"],
            ["faults"],
        ),
        (failure_time, ["--quick"], ["rows"]),
        (endurance, ["--quick"], ["endurance"]),
        (transition_time, ["--quick", "--repeats=1"], ["switches", "pauses"]),
        (curve, ["--quick"], ["curve"]),
    ],
)
def test_script_finds_nothing_wrong_and_writes_what_tables_need(
    script, arguments, tables, tmp_path, capsys
):
    path = tmp_path / f"{script.__name__}.json"
    status = script.main([*arguments, f"--json={path}"])
    assert status == 0, capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["name"] == path.stem and content["quick"]
    for table in tables:
        assert len(TABLES[table]({**content, "link": "results"})) > 2


# -- judging curves and growth -------------------------------------------------


def curve_run(**changes):
    state = {"weights": "w", "moments": "m", "rates": "r"}
    run = CurveRun(
        losses=[1.0, 0.5],
        evaluations=[(2.0, 1.0), (1.0, 0.5)],
        shapes=["2x1", "1x2"],
        states=[{0: (state, state)}, {0: (state, state)}],
        ids=[[0, 1], [1, 0]],
        step_ids=[[0, 1], [0, 1]],
        weights=[torch.zeros(1)],
    )
    return dataclasses.replace(run, **changes)


def test_each_check_of_a_curve_can_fail():
    good = curve_run()
    assert curve.broken_bits(good) == []
    assert curve.broken_samples(good, good, 2) == []
    other = {"weights": "x", "moments": "m", "rates": "r"}
    bad = curve_run(
        evaluations=[(2.0, 1.0), (1.1, 0.5)],
        states=[good.states[0], {0: (other, other)}],
    )
    assert curve.broken_bits(bad) == ["2x1 -> 1x2: test loss", "2x1 -> 1x2: weights"]
    lost = curve_run(ids=[[0, 0], [1, 0]], step_ids=[[0, 0], [0, 1]])
    assert len(curve.broken_samples(lost, good, 2)) == 2
    far = curve.distance(curve_run(losses=[1.0, 0.6]), good)
    assert far["training loss"] == pytest.approx(0.2) and far["test loss"] == 0.0


def test_growth_names_rank_and_count():
    early = {"descriptors": 9, "threads": 4, "memory_mb": 100.0, "store_keys": 30}
    late = {**early, "memory_mb": 115.0}
    assert endurance.Endurance(8, 1.0, [early], [late]).growth() == []
    late = {**early, "memory_mb": 117.0, "threads": 5}
    grown = endurance.Endurance(8, 1.0, [early], [late]).growth()
    assert grown == ["rank 0: threads 4 -> 5", "rank 0: memory_mb 100 -> 117"]
