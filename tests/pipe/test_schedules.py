"""Schedules are data: printed, parsed, checked, and as short as the theory says."""

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pipe_order import parse_schedule, schedule_text

GOLDEN = pathlib.Path(__file__).parent / "schedules"
NAMES = ("gpipe", "1f1b", "zb-h1")
UNITS = {"F": 1, "R": 1, "B": 2, "I": 1, "W": 1}

shapes = st.tuples(
    st.sampled_from(NAMES),
    st.integers(1, 12),  # micro-batches
    st.integers(1, 6),  # stages
).flatmap(
    lambda s: st.tuples(
        st.just(s[0]),
        st.just(s[1]),
        st.just(s[2]),
        st.integers(0, s[1]),  # recomputed
        st.integers(0, s[2]),  # first stage with a backward
    )
)


def makespan(text, units=UNITS):
    """End of the last operation when each takes its units; a second implementation
    of what an operation waits for."""
    lists = [line.split(": ")[1].split() for line in text.splitlines() if ": " in line]
    end = {}
    clock = [0] * len(lists)
    position = [0] * len(lists)

    def needs(j, op):
        kind, i = op[0], op[1:]
        if kind == "F" and j > 0:
            return [(j - 1, f"F{i}")]
        if kind in "BI" and j + 1 < len(lists):
            return [next((j + 1, k + i) for k in "BI" if k + i in lists[j + 1])]
        return []

    moved = True
    while moved:
        moved = False
        for j, ops in enumerate(lists):
            while position[j] < len(ops):
                op = ops[position[j]]
                if any(need not in end for need in needs(j, op)):
                    break
                start = max([clock[j], *(end[need] for need in needs(j, op))])
                clock[j] = end[j, op] = start + units[op[0]]
                position[j] += 1
                moved = True
    assert position == [len(ops) for ops in lists], "the lists wait for each other"
    return max(clock)


@given(shapes)
@settings(deadline=None)
def test_schedule_holds_every_cell_once_in_both_passes(shape):
    name, m, n, recomputed, first = shape
    text, _ = schedule_text(*shape)
    for j, line in enumerate(text.splitlines()):
        ops = line.split(":")[1].split()
        assert sorted(o for o in ops if o[0] == "F") == sorted(
            f"F{i}" for i in range(m)
        )
        done = sorted(int(o[1:]) for o in ops if o[0] in "BI")
        assert done == (list(range(m)) if j >= first else [])
        split = {o[1:] for o in ops if o[0] == "I"}
        assert split == {o[1:] for o in ops if o[0] == "W"}
        again = sorted(int(o[1:]) for o in ops if o[0] == "R")
        assert again == (list(range(recomputed)) if j >= first else [])
        for i in range(m):
            mine = [o[0] for o in ops if o[1:] == str(i)]
            assert mine in (
                ["F"],
                ["F", "B"],
                ["F", "R", "B"],
                ["F", "I", "W"],
                ["F", "R", "I", "W"],
            )


@given(shapes)
@settings(deadline=None)
def test_schedule_parses_back_to_itself_with_rising_clocks(shape):
    text, _ = schedule_text(*shape)
    stages = parse_schedule(text)
    again = "".join(
        f"{j}:" + "".join(f" {kind}{i}" for kind, i, _ in ops) + "\n"
        for j, ops in enumerate(stages)
    )
    assert again == text
    for ops in stages:
        clocks = [clock for _, _, clock in ops]
        assert clocks == sorted(set(clocks))


@given(shapes)
@settings(deadline=None)
def test_schedule_never_waits_in_a_circle(shape):
    assert makespan(schedule_text(*shape)[0]) > 0


@pytest.mark.parametrize("n", range(1, 9))
def test_schedules_are_as_long_as_their_closed_forms(n):
    for m in range(n, 25):
        assert makespan(schedule_text("gpipe", m, n, 0, 0)[0]) == 3 * (m + n - 1)
        assert makespan(schedule_text("1f1b", m, n, 0, 0)[0]) == 3 * (m + n - 1)
        assert makespan(schedule_text("zb-h1", m, n, 0, 0)[0]) == 3 * m + n - 1


@pytest.mark.parametrize("n", range(1, 9))
def test_live_microbatches_are_bounded_as_promised(n):
    for m in range(1, 25):
        assert schedule_text("gpipe", m, n, 0, 0)[1] == [m] * n
        assert schedule_text("1f1b", m, n, 0, 0)[1] == [min(m, n - j) for j in range(n)]
        assert max(schedule_text("zb-h1", m, n, 0, 0)[1]) <= n
        assert max(schedule_text("gpipe", m, n, m, 0)[1]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_schedule_text_is_the_golden_one(name):
    text, _ = schedule_text(name, 4, 3, 2, 1)
    assert text == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: F0 G0\n", "line 0: expected 'STAGE: ' and operations"),
        ("1: F0\n", "line 0"),
        ("0: F\n", "line 0"),
        ("0: F-1\n", "line 0"),
        ("0: F0 F0\n", "F0: expected each micro-batch once"),
        ("0: B0 F0\n", "B0: expected the F of its micro-batch before it"),
        ("0: F0 B0 R0\n", "B0: expected the R of its micro-batch before it"),
        ("0: F0 W0\n", "W0: expected the I of its micro-batch before it"),
        ("0: F0 B0 I0\n", "I0: expected each micro-batch once"),
        ("0: F0\n1: F0 F1\n", "F1: expected the F of the stage before it"),
        ("0: F0 B0\n1: F0\n", "B0: expected a B or I of the stage after it"),
        ("0: F0 B0 F1 B1\n1: F1 B1 F0 B0\n", "no operations that wait for each other"),
    ],
)
def test_malformed_schedule_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 1, 1, 0, 0), "expected 'gpipe', '1f1b' or 'zb-h1', got '2f2b'"),
        (("gpipe", 0, 1, 0, 0), "expected at least 1 micro-batch and 1 stage"),
        (("gpipe", 1, 0, 0, 0), "expected at least 1 micro-batch and 1 stage"),
        (("1f1b", 1, 2, 0, 3), "expected a first stage from 0 to 2, got 3"),
    ],
)
def test_impossible_schedule_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule_text(*arguments)
