"""A job that is killed as a whole goes on as if nothing had happened."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from faults.kills_job import Curve, Done, random_parts, samples_exactly_once
from faults.kills_worker import BATCH, SAMPLES, STEPS, Part
from kills_and_resumes import differences, holds

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from readme_tables import TABLES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.distributed
def test_killed_job_goes_on_as_if_nothing_had_happened(tmp_path):
    path = tmp_path / "kills_and_resumes.json"
    script = ROOT / "benchmarks" / "kills_and_resumes.py"
    run = subprocess.run(
        [sys.executable, str(script), "--quick", f"--json={path}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads(path.read_text())
    runs = content["restarts"]["systems"]
    assert runs["other N and K"]["kills"] == 3 and runs["equal N and K"]["kills"] == 1
    assert runs["other N and K"]["plans"] > 1 and runs["equal N and K"]["bitwise"]
    parts = runs["other N and K"]["parts"]
    assert any(part["newest_checkpoint"] != "left as it was" for part in parts)
    assert any(part["from_step"] > 0 for part in parts)
    table = TABLES["restarts"](content)
    assert any("equal N and K" in line and "| yes |" in line for line in table)


def a_curve():
    ids = [list(range(i, min(i + BATCH, SAMPLES))) for i in range(0, SAMPLES, BATCH)]
    return Curve([1.0] * STEPS, [1.0], ids, [Done(Part(0, 1, 1, 1), 0, [], "", 1.0)])


def test_lost_and_repeated_samples_are_seen():
    curve = a_curve()
    assert samples_exactly_once(curve)
    lost = dataclasses.replace(curve, ids=[curve.ids[0][1:], *curve.ids[1:]])
    again = dataclasses.replace(curve, ids=[curve.ids[1], *curve.ids[1:]])
    moved = [[*curve.ids[0], *curve.ids[-1]], *curve.ids[1:-1], []]
    for other in (lost, again, dataclasses.replace(curve, ids=moved)):
        assert not samples_exactly_once(other)


def test_other_losses_are_seen():
    curve = a_curve()
    later = dataclasses.replace(curve, losses=[*curve.losses[:-1], 1.01])
    assert differences(later, curve) == [pytest.approx(0.01)]
    result = {
        "difference_by_epoch": [0.01],
        "weights_difference": 0.0,
        "tolerance": 1e-9,
        "samples_exactly_once": True,
    }
    assert not holds(result)
    assert holds({**result, "difference_by_epoch": [1e-10]})
    assert not holds({**result, "tolerance": 1.0, "samples_exactly_once": False})


def test_parts_are_drawn_as_asked():
    parts = random_parts(random.Random(0), 20, 12, plan=None)
    assert len(parts) == 21 and parts[-1].kill_step is None
    assert {part.world_size for part in parts} == {1, 2, 3, 4}
    assert all(part.kill_step < 12 * STEPS for part in parts[:-1])
    assert len({part.place for part in parts[:-1]}) == 5
    same = random_parts(random.Random(0), 5, 12, plan=(2, 1))
    assert {(part.world_size, part.num_stages, part.cache) for part in same} == {
        (2, 1, False)
    }
