"""The doctor's training: what it shows where all works, and where it does not."""

import json

import pytest

from pipetransformer.cli import self_test
from pipetransformer.cli.main import main

PARTS = [
    "training",
    "change of plan",
    "activation cache",
    "loss of a process",
    "report",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the processes of a self-test leave behind, and their exit codes."""
    folder = tmp_path_factory.mktemp("self-test")
    ends = self_test._train(folder)
    assert ends[0][0] == 0, ends
    codes = [code for code, _ in ends]
    return json.loads((folder / "summary.json").read_text()), codes, folder


def judged(summary, codes, folder):
    found = list(self_test._judge(summary, codes, folder))
    assert [finding.name for finding in found] == PARTS
    return {f.name: f.status for f in found if f.status != "ok"}, found


@pytest.mark.distributed
def test_all_parts_work_here(trained):
    bad, found = judged(*trained)
    assert bad == {}, found
    told = {finding.name: finding.value for finding in found}
    assert "K=2 R=1 to K=1 R=2" in told["change of plan"]
    assert told["activation cache"] == "96 of 96 samples hit"
    assert "rank 1 killed" in told["loss of a process"]


@pytest.mark.distributed
def test_what_did_not_happen_is_missing(trained):
    summary, codes, folder = trained
    for change, part in (
        (lambda s: s["transformations"].clear(), "change of plan"),
        (lambda s: s["epochs"][2].update(cache_hits=95), "activation cache"),
        (lambda s: s["recoveries"].clear(), "loss of a process"),
        (lambda s: s["epochs"][3].update(unique_samples=95), "loss of a process"),
        (lambda s: s["epochs"][4].update(train_loss=9.9), "training"),
    ):
        other = json.loads(json.dumps(summary))
        change(other)
        assert judged(other, codes, folder)[0] == {part: "missing"}
    assert judged(summary, [0, 0], folder)[0] == {"loss of a process": "missing"}


@pytest.mark.distributed
def test_the_command_trains_when_it_is_asked_to(capsys):
    assert main(["doctor", "--run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in told["findings"]]
    assert names[-len(PARTS) :] == PARTS and told["missing"] == []


def test_a_training_that_fails_tells_its_last_words(monkeypatch, capsys):
    def fails(folder):
        return [(1, "ValueError: expected luck, got none")] * 2

    monkeypatch.setattr(self_test, "_train", fails)
    assert main(["doctor", "--run", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["missing"] == ["training"]
    last = told["findings"][-1]
    assert "exit code 1" in last["value"] and "expected luck" in last["value"]


def test_without_the_option_nothing_trains(monkeypatch, capsys):
    def never(folder):
        raise AssertionError("no training was asked for")

    monkeypatch.setattr(self_test, "_train", never)
    assert main(["doctor", "--json"]) == 0
    capsys.readouterr()
