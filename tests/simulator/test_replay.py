"""The replayer alone: tasks on resources, first come first served."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer import _C


def replay(num_resources, tasks, waits=(), **fill):
    spans, grains, left = _C.simulator.replay(
        num_resources, list(tasks), list(waits), **fill
    )
    return spans, grains, left


@st.composite
def graphs(draw):
    """Tasks as (resource, duration); each may wait for earlier ones."""
    num_resources = draw(st.integers(1, 4))
    tasks = draw(
        st.lists(
            st.tuples(st.integers(0, num_resources - 1), st.integers(0, 9)),
            max_size=20,
        )
    )
    waits = [
        (earlier, task)
        for task in range(1, len(tasks))
        for earlier in draw(st.sets(st.integers(0, task - 1), max_size=3))
    ]
    return num_resources, tasks, waits


def test_resource_serves_tasks_as_they_become_ready():
    # Task 2 is ready at 1, task 1 at 5: the higher number goes first.
    spans, _, _ = replay(3, [(1, 5), (0, 2), (0, 3), (2, 1)], [(0, 1), (3, 2)])
    assert spans == [(0, 5), (5, 7), (1, 4), (0, 1)]


def test_ties_go_to_the_lower_number():
    spans, _, _ = replay(1, [(0, 2), (0, 3), (0, 1)])
    assert spans == [(0, 2), (2, 5), (5, 6)]


@given(graphs())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_replay_is_a_schedule_without_needless_gaps(graph):
    num_resources, tasks, waits = graph
    spans, grains, left = replay(num_resources, tasks, waits)
    assert grains == [] and left == 0
    ready = [0] * len(tasks)
    for earlier, task in waits:
        assert spans[task][0] >= spans[earlier][1]
        ready[task] = max(ready[task], spans[earlier][1])
    for resource in range(num_resources):
        mine = sorted(
            (*spans[i], ready[i]) for i, task in enumerate(tasks) if task[0] == resource
        )
        end = 0
        for begin, finish, since in mine:
            assert begin == max(end, since)  # never idle with a ready task
            end = finish
    for (_, duration), (begin, finish) in zip(tasks, spans, strict=True):
        assert finish - begin == duration


@given(graphs(), st.integers(0, 200), st.integers(1, 5))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_fill_work_is_done_in_the_gaps_or_left(graph, work, grain):
    num_resources, tasks, waits = graph
    spans, grains, left = replay(
        num_resources, tasks, waits, fill_ns=work, grain_ns=grain
    )
    assert sum(end - begin for _, begin, end in grains) + left == work
    for resource in range(num_resources):
        busy = sorted(
            [spans[i] for i, task in enumerate(tasks) if task[0] == resource]
            + [(begin, end) for at, begin, end in grains if at == resource]
        )
        for (_, end), (begin, _) in zip(busy, busy[1:], strict=False):
            assert begin >= end


def test_grain_never_takes_the_place_of_a_task_that_is_ready_then():
    # At 4 the second resource's task becomes ready; a grain ends there as well.
    spans, grains, left = replay(2, [(0, 4), (1, 3)], [(0, 1)], fill_ns=100, grain_ns=2)
    assert spans == [(0, 4), (4, 7)]
    assert grains == [(1, 0, 2), (1, 2, 4), (0, 4, 6), (0, 6, 8)]
    assert left == 92


def test_grain_is_not_interrupted():
    spans, grains, _ = replay(2, [(0, 4), (1, 3)], [(0, 1)], fill_ns=3, grain_ns=3)
    assert grains == [(1, 0, 3)]
    spans, grains, _ = replay(2, [(0, 4), (1, 3)], [(0, 1)], fill_ns=6, grain_ns=3)
    assert spans[1] == (6, 9)


def test_tasks_without_duration_are_taken_in_at_their_instant():
    spans, grains, _ = replay(
        2, [(0, 4), (0, 0), (1, 3)], [(0, 1), (1, 2)], fill_ns=8, grain_ns=4
    )
    assert spans[2] == (4, 7)
    assert grains[0] == (1, 0, 4)


@pytest.mark.parametrize(
    ("tasks", "waits", "fill", "message"),
    [
        ([(0, 1), (0, 1)], [(0, 1), (1, 0)], {}, "F[01] on stage 0 .*waits for itself"),
        ([(0, 1)], [(0, 0)], {}, "F0 on stage 0 of replica 0, which waits for itself"),
        (
            [(0, 1), (0, 1), (0, 1), (0, 1)],
            [(0, 1), (1, 2), (2, 1), (2, 3)],
            {},
            "F[12] on stage 0",
        ),
        ([(0, -1)], [], {}, "F0 .*a duration of at least 0 ns, got -1"),
        ([(0, 2**59), (0, 2**59), (0, 1)], [], {}, "at most 2.60 ns together"),
        ([(1, 1)], [], {}, "a resource below 1, got 1"),
        ([(0, 1)], [(0, 1)], {}, "waits: expected tasks below 1, got 0 before 1"),
        ([(0, 1)], [], {"fill_ns": -1}, "fill work: expected 0 to 2.60 ns"),
        ([(0, 1)], [], {"fill_ns": 1, "grain_ns": 0}, "grains of at least 1 ns"),
    ],
)
def test_malformed_graph_is_refused(tasks, waits, fill, message):
    with pytest.raises(ValueError, match=message):
        replay(1, tasks, waits, **fill)
