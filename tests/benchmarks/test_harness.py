"""Repeats are interleaved, judged, and turned into ratios or refusals."""

import argparse
import json

import pytest
from _harness import (
    RatioRefused,
    Repeat,
    Row,
    RunFailed,
    Sample,
    add_common_arguments,
    compared,
    interleave,
    machine,
    ratio,
    seeds_of,
    write_json,
)

CLEAN = Sample(10.0, 19.0)
DISTURBED = Sample(14.0, 19.0)


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
    assert series["a"].dropped == 0


def test_disturbed_repeat_is_dropped_counted_and_repeated():
    script = Script(a=[CLEAN, DISTURBED, CLEAN])
    series = interleave("ab", script, repeats=3, warmup=0)
    assert script.order == "ababab" + "a"
    row = series["a"].row("wall time", "s")
    assert (row.values, row.dropped, row.failed) == ((10.0, 10.0, 10.0), 1, 0)
    assert script.turns["a"] == [0, 1, 2, 1] and row.turns == (0, 1, 2)


def test_disturbed_repeats_are_repeated_a_limited_number_of_times():
    script = Script(a=[CLEAN, *[DISTURBED] * 9])
    series = interleave("a", script, repeats=3, warmup=0, extra=2)
    assert script.order == "a" * 5
    assert (len(series["a"].clean), series["a"].dropped) == (1, 4)


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
        (_row(1.0, 1.0, dropped=4), "expected >= 3 clean .* got 2 and 4 disturbed"),
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


def test_json_holds_rows_ratios_machine_and_further_sections(tmp_path):
    path = tmp_path / "new" / "speed.json"
    rows = [_row(3.0, 1.0, 2.0, dropped=1), _row(1.0, 1.0, 1.0, system="b")]
    result = ratio("a / b", *rows, better_than="a")
    write_json(path, "speed", rows, [result], quick=False, bound={"a / b": 3.75})
    content = json.loads(path.read_text())
    assert content["rows"][0] == {
        "system": "a",
        "metric": "wall time",
        "unit": "s",
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "repeats": 3,
        "values": [3.0, 1.0, 2.0],
        "dropped": 1,
        "failed": 0,
        "foreign_share": None,
    }
    assert content["ratios"] == [
        {
            "name": "a / b",
            "value": 2.0,
            "min": 1.0,
            "max": 3.0,
            "repeats": 3,
            "better_than": "a",
        }
    ]
    assert content["bound"] == {"a / b": 3.75}
    assert (content["name"], content["quick"]) == ("speed", False)
    assert content["machine"] == machine()
    assert [each.name for each in path.parent.iterdir()] == ["speed.json"]


def test_json_of_a_system_that_always_failed_has_no_median(tmp_path):
    write_json(tmp_path / "x.json", "x", [_row(failed=3)], [], quick=False)
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert (row["median"], row["repeats"], row["failed"]) == (None, 0, 3)


@pytest.mark.parametrize("told", [True, False])
def test_quick_result_is_marked_even_if_the_script_does_not_say_so(tmp_path, told):
    rows = [_row(2.0), _row(1.0, system="b")]
    result = ratio("a / b", *rows, better_than="a", quick=True)
    write_json(tmp_path / "x.json", "x", rows, [result], quick=told)
    assert json.loads((tmp_path / "x.json").read_text())["quick"] is True


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, "x", [_row(float("nan"))], [], quick=False)
    with pytest.raises(ValueError, match=r"expected new names, got \['machine'\]"):
        write_json(path, "x", [], [], quick=False, machine={})
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_machine_names_what_a_figure_depends_on():
    found = machine()
    assert set(found) == {"cpu", "cores", "gpu", "torch", "cuda"}
    assert found["cpu"] and found["cores"] >= 1
    torch = pytest.importorskip("torch")
    assert (found["torch"], found["cuda"]) == (torch.__version__, torch.version.cuda)


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
