"""``simulate``: what it prints, writes and refuses."""

import json

import pytest

from pipetransformer.cli.files import read_text
from pipetransformer.planner import Plan
from tests.cli.model_files import files
from tests.explanation.cases import a_cluster, a_profile
from tests.planner import instances

__all__ = ["files"]


def test_json_has_every_promised_field(files):
    path = files.plan("--num-stages", 3)
    plan = Plan.from_json(read_text(path))
    values = files.json("simulate", "--plan", path, *files.model)
    assert values["simulated"] is True
    assert values["step_ns"] == plan.simulated_step_ns
    assert values["bubble_fraction"] == plan.bubble_fraction
    assert len(values["stage_busy_ns"]) == 3
    assert len(values["peak_bytes_per_stage"]) == 3
    assert all(
        peak <= room
        for peak, room in zip(
            values["peak_bytes_per_stage"], plan.bytes_per_stage, strict=True
        )
    )
    assert values["exposed_all_reduce_ns"] >= 0
    assert values["notes"] == []


def test_steps_add_up(files):
    path = files.plan()
    one = files.json("simulate", "--plan", path, *files.model)
    many = files.json("simulate", "--plan", path, *files.model, "--steps", 100)
    assert many["step_ns"] == one["step_ns"]
    assert many["total_ns"] == 100 * one["step_ns"]


def test_a_plan_with_a_cache_takes_what_it_was_planned_to_take(files):
    path = files.plan("--frozen", 3, "--num-samples", 1000)
    plan = Plan.from_json(read_text(path))
    assert plan.cache == "host"
    values = files.json("simulate", "--plan", path, *files.model)
    assert values["step_ns"] == plan.simulated_step_ns


def test_trace_is_a_timeline(files):
    path, trace = files.plan("--num-stages", 2), files.path("trace.json")
    files.json("simulate", "--plan", path, *files.model, "--trace", trace)
    events = json.loads(read_text(trace))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"F0", "B0"} <= names or {"F0", "I0", "W0"} <= names


def test_trace_to_standard_output_is_alone(files):
    path, trace = files.plan("--num-stages", 2), files.path("trace.json")
    command = ("simulate", "--plan", path, *files.model)
    files.json(*command, "--trace", trace)
    assert files.run(*command, "--trace", "-") == (0, read_text(trace), "")
    code, out, err = files.run(*command, "--trace", "-", "--json")
    assert (code, out) == (2, "") and "--trace: expected a file alongside --json" in err
    code, out, err = files.run(*command, "--trace", "")
    assert (code, out) == (2, "") and "--trace: expected a file's name" in err


def test_text_has_table_and_grid(files):
    path = files.plan("--num-stages", 2)
    code, out, err = files.run("simulate", "--plan", path, *files.model, "--steps", 3)
    assert (code, err) == (0, "")
    assert "simulated: step " in out and "3 steps: " in out
    assert "\nSchedule" in out and "stage 1  " in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_another_profile_is_a_note(files):
    path = files.plan()
    files.write("profile.json", a_profile(8, heavy=0).to_json())
    values = files.json("simulate", "--plan", path, *files.model)
    assert values["notes"] == ["note: the plan was made from another profile"]
    _, out, _ = files.run("simulate", "--plan", path, *files.model)
    assert "note: the plan was made from another profile" in out


def test_what_does_not_fit_is_a_note(files):
    path = files.plan()
    files.write("cluster.json", a_cluster(device_memory_bytes=1000).to_json())
    values = files.json("simulate", "--plan", path, *files.model)
    peak = values["peak_bytes_per_stage"][0]
    text = f"note: stage 0 does not fit: {peak / 1e6:.1f} of 0.0 MB"
    assert text in values["notes"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("profile.json", a_profile(5).to_json(), "cuts"),
        ("profile.json", instances.equal_profile(9).to_json(), "cuts"),
        ("cluster.json", a_cluster(devices_per_node=2).to_json(), "num_stages"),
        ("profile.json", "{", "profile"),
        ("cluster.json", "[]", "cluster"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(files, name, text, message):
    path = files.plan("--num-stages", 3)
    files.write(name, text)
    code, out, err = files.run("simulate", "--plan", path, *files.model)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_no_steps_are_refused(files):
    path = files.plan()
    code, _, err = files.run("simulate", "--plan", path, *files.model, "--steps", 0)
    assert code == 2 and "--steps" in err
