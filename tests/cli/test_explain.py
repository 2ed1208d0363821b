"""``explain``: a plan, alone or with its model, and the summary of a run."""

import io
import json

import pytest

from pipetransformer.cli.drawing import _wrapped
from pipetransformer.cli.files import read_text
from pipetransformer.cli.main import main
from pipetransformer.planner import Plan
from tests.cli.model_files import files
from tests.explanation.cases import a_profile
from tests.explanation.test_run import a_summary

__all__ = ["files"]


def test_a_plan_with_its_model_is_compared(files):
    path = files.plan("--frozen", 3)
    values = files.json("explain", path, *files.model)
    assert values["kind"] == "plan"
    assert values["plan"] == json.loads(read_text(path))
    assert values["limiting_resource"] == values["limits"][0]["resource"]
    assert len(values["counterfactuals"]) == 5
    times = [way["step_ns"] for way in values["counterfactuals"][3:]]
    assert all(values["step_ns"] <= step for step in times)  # no cache, serial prefix


def test_a_plan_alone_tells_what_it_holds(files):
    values = files.json("explain", files.plan("--num-stages", 3))
    assert values["limits"] == values["counterfactuals"] == []
    assert [stage["forward_ns"] for stage in values["stages"]] == [None] * 3
    assert values["idle_devices"] == 1


@pytest.mark.parametrize("frozen", [{}, {"boundary": 4, "prefix": "replicated"}])
def test_a_plan_written_by_hand_is_explained(files, frozen):
    boundary = frozen.get("boundary", 0)
    plan = {
        "version": 1,
        "boundary": boundary,
        "num_stages": 2,
        "num_replicas": 2,
        "num_microbatches": 4,
        "samples_per_microbatch": 2,
        "global_batch": 16,
        "cuts": [boundary, 6, 8],
        **frozen,
    }
    path = files.write("plan.json", json.dumps(plan))
    assert files.json("explain", path)["plan"]["plan_hash"] > 0
    values = files.json("explain", path, *files.model)
    assert len(values["stages"]) == 2 and values["limiting_resource"]
    assert files.run("explain", path, *files.model)[0] == 0


def test_a_plan_comes_through_every_command(files):
    first = files.plan("--num-stages", 4)
    second = files.plan("--frozen", 4, "--current", first, "--remaining-steps", 10_000)
    plan = Plan.from_json(read_text(second))
    simulated = files.json("simulate", "--plan", second, *files.model)
    assert simulated["step_ns"] == plan.simulated_step_ns
    explained = files.json("explain", second, *files.model)
    assert explained["step_ns"] == plan.simulated_step_ns
    assert explained["transition"] == plan.transition.to_dict()
    third = files.plan("--frozen", 4, "--current", second)
    again = Plan.from_json(read_text(third))
    assert again.shape == plan.shape and again.cuts == plan.cuts  # nothing better


def test_text_names_limit_and_other_ways(files):
    path = files.plan("--frozen", 3, "--num-stages", 2)
    code, out, err = files.run("explain", path, *files.model)
    assert (code, err) == (0, "")
    for part in (
        "Inputs",
        "Limiting resource",
        "were it twice as good",
        "best static plan",
        "plain DDP",
        "paper, static",
        "no cache",
        "serial prefix",
        "Reasons",
    ):
        assert part in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_a_run_is_explained(files):
    path = files.write("summary.json", json.dumps(a_summary()))
    values = files.json("explain", path)
    assert values["kind"] == "run" and len(values["changes"]) == 2
    code, out, err = files.run("explain", path)
    assert (code, err) == (0, "")
    assert "Predicted against measured" in out and "too dear" in out


def test_a_runs_folder_is_explained_as_its_summary_is(files):
    path = files.write("summary.json", json.dumps(a_summary()))
    assert files.run("explain", files.folder) == files.run("explain", path)
    (files.folder / "empty").mkdir()
    code, out, err = files.run("explain", files.folder / "empty")
    assert (code, out) == (2, "")
    assert "No such file" in err and "summary.json" in err


def test_what_the_consoles_encoding_lacks_is_escaped(files, monkeypatch):
    profile = json.loads(a_profile(8, heavy=5).to_json()) | {"name": "größe"}
    files.write("profile.json", json.dumps(profile))
    path = files.plan()
    for encoding, name in (("utf-8", "größe"), ("ascii", r"gr\xf6\xdfe")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", stream)
            assert main(["explain", path, *files.model]) == 0
        out = stream.buffer.getvalue().decode(encoding)
        assert f"model '{name}'" in out and "Reasons" in out


def test_no_escape_of_a_summary_reaches_the_console(files):
    for path in (["reason"], ["phases"], ["transition", "rule"]):
        summary = a_summary()
        inner = summary["transformations"][0]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = {"\x1b[2J": -1} if path == ["phases"] else "\x1b[2J"
        name = files.write("summary.json", json.dumps(summary))
        code, out, err = files.run("explain", name)
        assert (code, out) == (2, "") and "\x1b" not in err
        assert f"{name}: summary transformations[0]" in err and err.count("\n") == 1


def test_a_word_of_many_lines_is_wrapped_in_one_pass():
    """As the stages of a plan are; copied for each line, it would not end in time."""
    word = "1|" * 10_000_000
    lines = _wrapped(f"- layers {word}", 80).splitlines()
    assert lines[0] == "- layers" and lines[1].startswith("  1|1|")
    assert max(map(len, lines)) == 80
    assert "".join(line[2:] for line in lines[1:]) == word


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "expected a plan"),
        ('{"version": 1}', "expected a plan"),
        ('{"plan_hash": 1, "version": 1}', "plan"),
        ('{"epochs": 3}', "summary"),
    ],
)
def test_what_is_neither_plan_nor_run_is_refused(files, text, message):
    path = files.write("it.json", text)
    code, out, err = files.run("explain", path)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}: ") and message in err
    assert err.count("\n") == 1


def test_options_that_would_be_ignored_are_refused(files):
    run = files.write("summary.json", json.dumps(a_summary()))
    code, _, err = files.run("explain", run, *files.model)
    assert code == 2 and "got the summary of a run" in err
    code, _, err = files.run("explain", files.plan(), "--profile", files.profile)
    assert code == 2 and "expected both or none" in err


def test_a_plan_from_standard_input(files, monkeypatch):
    data = io.BytesIO(read_text(files.plan()).encode())
    monkeypatch.setattr("sys.stdin", type("In", (), {"buffer": data}))
    assert files.json("explain", "-")["kind"] == "plan"
