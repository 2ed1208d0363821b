"""``plan``: what it prints, writes and returns."""

import json
import sys

import pytest

from pipetransformer.cli.files import read_text
from pipetransformer.planner import Plan
from tests.cli.model_files import files
from tests.explanation.cases import a_cluster, a_profile

__all__ = ["files"]

PROMISED = {
    "num_stages",
    "num_replicas",
    "num_microbatches",
    "samples_per_microbatch",
    "cuts",
    "schedule",
    "predicted_step_ns",
    "simulated_step_ns",
    "bytes_per_stage",
    "idle_devices",
    "transition",
    "candidates",
    "reasons",
    "profile_hash",
    "plan_hash",
}


def plan_of(files, *options, code=0):
    return files.json("plan", *files.model, "--global-batch", 16, *options, code=code)


def test_json_is_a_plan_with_every_promised_field(files):
    values = plan_of(files)
    assert values.keys() >= PROMISED
    plan = Plan.from_json(json.dumps(values))
    assert plan.to_dict() == values
    assert plan.cuts[0] == 0 and plan.cuts[-1] == 8


def test_output_writes_what_json_prints(files):
    path = files.path("out.json")
    values = plan_of(files, "--output", path)
    assert json.loads(read_text(path)) == values
    code, out, err = files.run(
        "plan", *files.model, "--global-batch", 16, "--output", path
    )
    assert (code, err) == (0, "") and not out.startswith("{")
    assert json.loads(read_text(path)) == values


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_output_to_standard_output_is_alone(files, form):
    options = ("plan", *files.model, "--global-batch", 16, "--output", "-", *form)
    code, out, err = files.run(*options)
    assert (code, err) == (0, "")
    assert Plan.from_json(out).to_dict() == plan_of(files)
    options = ("plan", *files.model, "--global-batch", 16, "--output", "", *form)
    code, out, err = files.run(*options)
    assert (code, out) == (2, "") and "--output: expected a file's name" in err


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (("--num-stages", 3), "num_stages", 3),
        (("--num-microbatches", 4), "num_microbatches", 4),
        (("--frozen", 3), "boundary", 3),
        (("--checkpoint", "always"), "checkpoint", "always"),
        (("--num-stages", 4, "--schedule", "gpipe"), "schedule", "gpipe"),
        (("--num-stages", 4, "--schedule", "1f1b"), "schedule", "1f1b"),
        (("--num-stages", 4, "--schedule", "zb-h1"), "schedule", "zb-h1"),
        (("--num-samples", 640), "num_samples", 640),
        (("--accumulation-steps", 4), "accumulation_steps", 4),
        (("--max-replicas", 1, "--num-stages", 2), "num_replicas", 1),
    ],
)
def test_options_are_kept(files, options, field, value):
    assert plan_of(files, *options)[field] == value


def test_a_plan_in_force_says_how_many_batches_share_a_step(files):
    current = ("--current", files.plan("--accumulation-steps", 3))
    assert plan_of(files, *current)["accumulation_steps"] == 3
    assert (
        plan_of(files, *current, "--accumulation-steps", 2)["accumulation_steps"] == 2
    )
    assert "accumulation_steps" not in plan_of(files)
    huge = plan_of(files, "--accumulation-steps", 2**60)
    assert 0 < huge["lower_bound_ns"] <= huge["simulated_step_ns"]
    code, _, err = files.run(
        "plan", *files.model, "--global-batch", 16, "--accumulation-steps", 0
    )
    assert code == 2 and "--accumulation-steps" in err


def test_auto_takes_the_fastest_schedule(files):
    best = plan_of(files, "--num-stages", 4)
    assert len({c["schedule"] for c in best["candidates"]}) > 1
    for name in ("gpipe", "1f1b", "zb-h1"):
        forced = plan_of(files, "--num-stages", 4, "--schedule", name)
        assert best["simulated_step_ns"] <= forced["simulated_step_ns"]


def test_cache_tiers_of_the_cluster_are_tried_once_layers_are_frozen(files):
    assert {c["cache"] for c in plan_of(files)["candidates"]} == {"none"}
    frozen = plan_of(files, "--frozen", 3, "--num-microbatches", 4)
    assert frozen["cache"] == "host"
    assert {c["cache"] for c in frozen["candidates"]} == {"none", "host"}
    files.write("cluster.json", a_cluster().to_json())
    assert plan_of(files, "--frozen", 3)["cache"] == "none"


def test_devices_are_a_tier_for_a_known_number_of_samples(files):
    files.write("cluster.json", a_cluster().to_json())
    assert plan_of(files, "--num-samples", 40)["cache"] == "none"
    frozen = plan_of(files, "--frozen", 3, "--num-samples", 40, "--num-microbatches", 4)
    assert frozen["cache"] == "device"
    assert {c["cache"] for c in frozen["candidates"]} == {"none", "device"}


@pytest.mark.parametrize(
    ("shares", "others"),
    [
        ({}, set()),  # pipelined was left out by its bound
        ({"replica_link_bytes_per_s": 10**9}, {"filled"}),
        ({"cores_permille": 2000}, {"filled"}),
    ],
)
def test_frozen_layers_run_where_the_machines_let_them(files, shares, others):
    roomy = a_cluster(device_memory_bytes=10**9, **shares)
    files.write("cluster.json", roomy.to_json())
    narrow = ("--num-microbatches", 4, "--schedule", "gpipe", "--max-replicas", 1)
    found = plan_of(files, "--frozen", 3, "--num-stages", 2, *narrow)
    placed = {each["prefix"] for each in found["candidates"]} | {found["prefix"]}
    assert placed == {"replicated"} | others
    for asked in ("replicated", "pipelined", "filled"):
        forced = plan_of(files, "--frozen", 3, "--num-stages", 2, "--prefix", asked)
        assert forced["prefix"] == asked
    assert plan_of(files, "--prefix", "filled")["prefix"] == "none"


def test_who_runs_the_schedule_is_told(files):
    command = ("plan", *files.model, "--global-batch", 16, "--num-stages", 4)
    told = "the engine with PipeConfig(schedule=...)"
    for name, expected in (("zb-h1", True), ("gpipe", False)):
        code, out, _ = files.run(*command, "--schedule", name)
        assert code == 0 and (told in " ".join(out.split())) is expected


def test_a_batch_with_fewer_rows_than_devices_has_as_many_replicas(files):
    files.write("profile.json", a_profile(4).to_json())
    command = ("plan", *files.model, "--num-stages", 1, "--global-batch", 3)
    assert files.json(*command, "--replicas", "all")["num_replicas"] == 3
    assert files.json(*command)["num_replicas"] == 3
    values = files.json(*command, "--max-replicas", 3)
    assert values["num_replicas"] == 3


def test_text_has_headline_stages_grid_candidates_and_reasons(files):
    code, out, err = files.run(
        "plan", *files.model, "--global-batch", 16, "--frozen", 2, "--num-stages", 2
    )
    assert (code, err) == (0, "")
    assert out.startswith("plan ") and "K=2 R=2" in out.splitlines()[0]
    positions = [
        out.index(f"\n{title}")
        for title in ("Stages", "Schedule", "Candidates", "Reasons")
    ]
    assert positions == sorted(positions)
    assert "Transition" not in out  # no plan before it
    assert "stage 0  " in out and "stage 1  " in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_a_change_of_plan_is_priced(files):
    current = files.plan("--num-stages", 4)
    change = ("--current", current, "--frozen", 4)
    values = plan_of(files, *change, "--remaining-steps", 100_000)
    transition = values["transition"]
    assert transition["accepted"] and values["num_stages"] < 4
    assert transition["remaining_steps"] == 100_000
    assert transition["pay_back_steps"] > 0
    assert sum(transition["terms_ns"].values()) == transition["pause_ns"]

    stays = plan_of(files, *change, "--remaining-steps", 0)
    assert stays["num_stages"] == 4 and not stays["transition"]["accepted"]
    assert stays["transition"]["rule"]

    code, out, _ = files.run("plan", *files.model, "--global-batch", 16, *change)
    assert code == 0 and "\nTransition\n" in out
    assert "rewire" in out and "1000 steps left" in out  # the default


def test_where_nothing_fits_the_reasons_are_named(files):
    tiny = a_cluster(device_memory_bytes=10**6)
    files.write("cluster.json", tiny.to_json())
    values = plan_of(files, code=1)
    assert set(values) == {"error", "refusals"}
    assert values["error"].startswith("plan: expected a pipeline that fits, got none")
    assert len(values["refusals"]) == 4
    for length, refusal in enumerate(values["refusals"], start=1):
        assert refusal.startswith(f"K={length} does not fit: layers ")
        assert "bytes of 1000000, the largest is layer" in refusal

    code, out, err = files.run("plan", *files.model, "--global-batch", 16)
    assert (code, out) == (1, "")
    first, *rest = err.splitlines()
    assert first == "error: plan: expected a pipeline that fits, got none"
    assert rest == [f"- {refusal}" for refusal in values["refusals"]]


def test_a_change_from_another_models_plan_is_refused(files):
    current = files.plan()
    files.write("profile.json", a_profile(6).to_json())
    code, out, err = files.run(
        "plan", *files.model, "--global-batch", 16, "--current", current
    )
    assert (code, out) == (2, "")
    assert "expected a plan of 6 layers (the profile's), got one of 8" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--frozen", 8), "boundary"),
        (("--num-stages", 5), "num_stages"),
        (("--num-stages", 0), "--num-stages"),
        (("--global-batch", "many"), "--global-batch"),
        (("--schedule", "fastest"), "--schedule"),
        (("--remaining-steps", -1), "--remaining-steps"),
        (("--remaining-steps", 5), "expected --current beside it"),
        (("--current", "nowhere.json"), "nowhere.json"),
        (("--output", "no/such/folder/plan.json"), "no/such/folder"),
    ],
)
def test_bad_input_is_one_line_and_two(files, options, message):
    code, out, err = files.run("plan", *files.model, "--global-batch", 16, *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_without_rich_text_says_what_to_install_and_json_works(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    code, out, err = files.run("plan", *files.model, "--global-batch", 16)
    assert (code, out) == (2, "") and "pip install rich" in err
    assert plan_of(files)["num_stages"] >= 1
