"""Repeats are interleaved, judged, and turned into ratios or refusals."""

import argparse
import json
import platform

import pytest
import torch

from harness.common import (
    Dropped,
    RatioRefused,
    Repeat,
    Row,
    RunFailed,
    Sample,
    Target,
    add_common_arguments,
    begin,
    compared,
    interleave,
    machine,
    ratio,
    seeds_of,
    write_json,
)
from pipetransformer import _build_info

CLEAN = Sample(10.0, 19.0)
DISTURBED = Sample(14.0, 19.0)
LOST = Dropped(1, 9.0, "disturbed", DISTURBED)


@pytest.fixture(scope="module")
def start():
    return begin()


class Script:
    """Plays back one sample per run, or a failure, and notes the order of the runs."""

    def __init__(self, **samples):
        self._samples = {system: list(each) for system, each in samples.items()}
        self.order = ""
        self.turns = {}

    def __call__(self, system, turn):
        self.turns.setdefault(system, []).append(turn)
        self.order += system
        left = self._samples.get(system)
        sample = left.pop(0) if left else CLEAN
        if sample is None:
            raise RunFailed(f"{system} broke")
        return Repeat(sample, {"wall time": sample.wall_s})


def _row(*values, system="a", **others):
    return Row(system, "wall time", "s", values, **others)


def test_systems_run_in_turn_after_their_warm_up():
    script = Script()
    series = interleave("ab", script, repeats=3, warmup=1)
    assert script.order == "ab" + "ababab"
    assert [len(series[system].clean) for system in "ab"] == [3, 3]


def test_warm_up_is_not_used():
    script = Script(a=[Sample(99.0, 19.0)])
    series = interleave("a", script, repeats=3, warmup=1)
    assert series["a"].row("wall time", "s").values == (10.0, 10.0, 10.0)
    assert series["a"].dropped == ()


def test_disturbed_repeat_is_dropped_counted_and_repeated():
    script = Script(a=[CLEAN, DISTURBED, CLEAN])
    series = interleave("ab", script, repeats=3, warmup=0)
    assert script.order == "ababab" + "a"
    row = series["a"].row("wall time", "s")
    assert (row.values, row.failed) == ((10.0, 10.0, 10.0), 0)
    (dropped,) = row.dropped
    assert (dropped.turn, dropped.value, dropped.sample) == (1, 14.0, DISTURBED)
    assert dropped.why.startswith("disturbed: 1.36 cores busy, undisturbed 1.90")
    assert script.turns["a"] == [0, 1, 2, 1] and row.turns == (0, 1, 2)


def test_superfluous_repeat_stays_among_the_raw_samples():
    # Alongside the first all others look disturbed; with a tenth it is the outlier.
    script = Script(a=[Sample(10.0, 22.0)])
    series = interleave("a", script, repeats=9, warmup=0, extra=1)["a"]
    assert series.turns == tuple(range(9))
    (dropped,) = series.row("wall time", "s").dropped
    assert (dropped.turn, dropped.sample) == (1, CLEAN)
    assert dropped.why == "a repeat of this number counts already"


def test_disturbed_repeats_are_repeated_a_limited_number_of_times():
    script = Script(a=[CLEAN, *[DISTURBED] * 9])
    series = interleave("a", script, repeats=3, warmup=0, extra=2)
    assert script.order == "a" * 5
    assert (len(series["a"].clean), len(series["a"].dropped)) == (1, 4)


@pytest.mark.parametrize("warmup", [0, 1])
def test_failed_repeat_is_kept_and_never_made_up_for(warmup):
    script = Script(a=[None])
    series = interleave("ab", script, repeats=3, warmup=warmup)
    assert script.order == "ab" * (3 + warmup)
    assert series["a"].failures == ("a broke",)
    assert series["a"].row("wall time", "s").failed == 1


def test_other_exceptions_end_the_benchmark():
    def run(system, turn):
        raise KeyError(system)

    with pytest.raises(KeyError):
        interleave("a", run, repeats=3)


@pytest.mark.parametrize(("systems", "repeats"), [("aa", 3), ("ab", 0)])
def test_interleave_refuses_twins_and_no_repeats(systems, repeats):
    with pytest.raises(ValueError, match="interleave: expected repeats >= 1"):
        interleave(systems, Script(), repeats=repeats)


def test_foreign_share_is_published_with_the_row(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    script = Script(a=[Sample(10.0, 19.0, share) for share in (1.0, 2.0, 4.0)])
    series = interleave("a", script, repeats=3, warmup=0)
    assert series["a"].row("wall time", "s").foreign_share == 0.1


def test_row_knows_median_and_spread():
    row = _row(4.0, 2.0, 3.0)
    assert (row.median, row.spread) == (3.0, pytest.approx(2 / 3))


def test_ratio_pairs_repeats_of_the_same_number():
    over = _row(10.0, 30.0, 20.0, 70.0, turns=(0, 2, 3, 4))
    under = _row(5.0, 1.0, 10.0, 10.0, turns=(0, 1, 2, 3), system="b")
    result = ratio("a / b", over, under, better_than="a")
    assert (result.min, result.value, result.max) == (2.0, 2.0, 3.0)
    assert result.repeats == 3
    with pytest.raises(RatioRefused, match="expected >= 3 pairs"):
        ratio("a / b", over, _row(1.0, 1.0, 1.0, turns=(1, 2, 3)), better_than="a")


def test_ratio_is_the_median_of_paired_ratios():
    over, under = _row(10.0, 40.0, 30.0), _row(10.0, 20.0, 10.0, system="b")
    result = ratio("a / b", over, under, better_than="a")
    assert (result.value, result.min, result.max) == (2.0, 1.0, 3.0)
    assert (result.repeats, result.better_than) == (3, "a")


@pytest.mark.parametrize(
    ("over", "text"),
    [
        (_row(1.0, 1.0, 1.0, failed=1), "a, wall time: expected no failed .* got 1"),
        (
            _row(1.0, 1.0, dropped=(LOST,) * 4),
            "expected >= 3 clean .* got 2 and 4 disturbed",
        ),
        (_row(1.0, 1.0, 0.0), "expected values > 0, got 0.0"),
    ],
)
def test_ratio_is_refused_for_rows_that_must_not_be_compared(over, text):
    good = _row(1.0, 1.0, 1.0, system="b")
    for pair in ((over, good), (good, over)):
        with pytest.raises(RatioRefused, match=text):
            ratio("a / b", *pair, better_than="b")


def test_failed_repeat_refuses_the_ratio_of_a_quick_run_too():
    rows = _row(1.0, failed=1), _row(1.0, system="b")
    with pytest.raises(RatioRefused, match="expected no failed repeat"):
        ratio("a / b", *rows, better_than="b", quick=True)


def test_ratio_of_different_units_is_refused():
    other = Row("b", "rate", "1/s", (1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="expected equal units, got s and 1/s"):
        ratio("a / b", _row(1.0, 1.0, 1.0), other, better_than="b")


def test_json_holds_rows_ratios_machine_and_further_sections(tmp_path, start):
    path = tmp_path / "new" / "speed.json"
    rows = [
        _row(3.0, 1.0, 2.0, dropped=(LOST,), samples=(CLEAN,) * 3, turns=(0, 2, 3)),
        _row(1.0, 1.0, 1.0, system="b", turns=(0, 2, 3)),
    ]
    result = ratio("a / b", *rows, better_than="a", bound=3.75)
    write_json(path, "speed", rows, [result], start=start, quick=False, seed=7)
    content = json.loads(path.read_text())
    assert content["rows"][0] == {
        "system": "a",
        "metric": "wall time",
        "unit": "s",
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "repeats": 3,
        "values_of": "repeats",
        "values": [3.0, 1.0, 2.0],
        "turns": [0, 2, 3],
        "samples": [{"wall_s": 10.0, "cpu_s": 19.0, "foreign_s": None}] * 3,
        "dropped": [
            {
                "turn": 1,
                "value": 9.0,
                "why": "disturbed",
                "sample": {"wall_s": 14.0, "cpu_s": 19.0, "foreign_s": None},
            }
        ],
        "failed": 0,
        "foreign_share": None,
        "target": None,
        "met": None,
    }
    assert content["ratios"] == [
        {
            "name": "a / b",
            "value": 2.0,
            "min": 1.0,
            "max": 3.0,
            "repeats": 3,
            "better_than": "a",
            "bound": 3.75,
            "target": None,
            "met": None,
        }
    ]
    assert content["seed"] == 7
    assert (content["name"], content["quick"]) == ("speed", False)
    assert content["machine"] == machine()
    assert [each.name for each in path.parent.iterdir()] == ["speed.json"]


@pytest.mark.parametrize(
    ("target", "shown", "met"),
    [
        (Target(2.0), {"at_most": 2.0, "of": "median"}, True),
        (Target(1.9), {"at_most": 1.9, "of": "median"}, False),
        (Target(2.9, of="max"), {"at_most": 2.9, "of": "max"}, False),
        (Target(2.0, at_least=True), {"at_least": 2.0, "of": "median"}, True),
        (Target(1.5, at_least=True, of="min"), {"at_least": 1.5, "of": "min"}, False),
    ],
)
def test_target_is_judged_where_the_figure_stands(tmp_path, start, target, shown, met):
    path = tmp_path / "x.json"
    row = _row(3.0, 1.0, 2.0, target=target)
    write_json(path, "x", [row], [], start=start, quick=False)
    (found,) = json.loads(path.read_text())["rows"]
    assert (found["target"], found["met"]) == (shown, met)


def test_target_of_a_ratio_is_judged_by_its_value(tmp_path, start):
    path, other = tmp_path / "x.json", _row(1.0, 1.0, 1.0, system="b")
    aims = [Target(bound, at_least=True, of="value") for bound in (2.0, 2.1)]
    ratios = [
        ratio("a / b", _row(3.0, 1.0, 2.0), other, better_than="a", target=aim)
        for aim in aims
    ]
    write_json(path, "x", [], ratios, start=start, quick=False)
    found = json.loads(path.read_text())["ratios"]
    assert [each["met"] for each in found] == [True, False]


def test_target_of_a_system_without_values_is_missed(tmp_path, start):
    path = tmp_path / "x.json"
    row = _row(failed=3, target=Target(2.0))
    write_json(path, "x", [row], [], start=start, quick=False)
    assert json.loads(path.read_text())["rows"][0]["met"] is False


def test_values_that_are_no_repeats_are_one_repeat(tmp_path, start):
    path = tmp_path / "x.json"
    row = _row(3.0, 1.0, 2.0, 4.0, values_of="ranks of one run")
    write_json(path, "x", [row], [], start=start, quick=False)
    (found,) = json.loads(path.read_text())["rows"]
    assert (found["repeats"], found["values_of"]) == (1, "ranks of one run")


def test_json_of_a_system_that_always_failed_has_no_median(tmp_path, start):
    path = tmp_path / "x.json"
    write_json(path, "x", [_row(failed=3)], [], start=start, quick=False)
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert (row["median"], row["repeats"], row["failed"]) == (None, 0, 3)


@pytest.mark.parametrize("told", [True, False])
def test_quick_result_is_marked_even_if_the_script_does_not_say_so(
    tmp_path, start, told
):
    rows = [_row(2.0), _row(1.0, system="b")]
    result = ratio("a / b", *rows, better_than="a", quick=True)
    write_json(tmp_path / "x.json", "x", rows, [result], start=start, quick=told)
    assert json.loads((tmp_path / "x.json").read_text())["quick"] is True


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path, start):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="Out of range float"):
        row = _row(float("nan"))
        write_json(path, "x", [row], [], start=start, quick=False)
    with pytest.raises(ValueError, match=r"expected new names, got \['machine'\]"):
        write_json(path, "x", [], [], start=start, quick=False, machine={})
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_machine_names_what_a_figure_depends_on():
    found = machine()
    assert set(found) == {
        *("cpu", "cores", "gpu", "torch", "cuda"),
        *("python", "os", "compiler", "flags", "threads"),
    }
    assert found["cpu"] and found["cores"] >= 1 and found["os"]
    assert (found["torch"], found["cuda"]) == (torch.__version__, torch.version.cuda)
    assert found["python"] == platform.python_version()
    assert found["threads"] == torch.get_num_threads()


def test_machine_names_the_build_of_the_extension():
    found = machine()
    assert found["compiler"] == _build_info.COMPILER
    assert {"-std=c++20", "-O2"} <= {*found["flags"].split()}
    assert "/" not in found["flags"]


def test_common_arguments_have_their_defaults():
    parser = argparse.ArgumentParser()
    add_common_arguments(parser)
    args = parser.parse_args([])
    assert vars(args) == {
        "json": None,
        "quick": False,
        "repeats": 3,
        "seed": 0,
        "seeds": None,
    }


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        ([], [0, 1, 2]),
        (["--repeats=2", "--seed=7"], [7, 8]),
        (["--seeds", "5", "3", "--repeats=9"], [5, 3]),
    ],
)
def test_each_repeat_has_a_seed(given, seeds):
    parser = argparse.ArgumentParser()
    add_common_arguments(parser)
    assert seeds_of(parser.parse_args(given)) == seeds


def test_refused_comparison_says_why_and_gives_nothing(capsys):
    slow, fast = (Row(n, "t", "s", (v,) * 3) for n, v in (("a", 4.0), ("b", 2.0)))
    assert [r.value for r in compared("b / a", slow, fast, better_than="a")] == [2.0]
    broken = Row("b", "t", "s", (2.0,) * 3, failed=1)
    assert compared("b / a", slow, broken, better_than="a") == []
    assert "refused: ratio b / a: b, t: expected no failed" in capsys.readouterr().out
