"""Timing by events, on pretended streams: what counts, and what is waited for."""

import torch

from pipetransformer.planner import _stopwatch


class Line:
    """A stream on which time passes only while queued work runs."""

    def __init__(self):
        self.queue, self.now_ms = [], 0.0

    def run(self):
        for job in self.queue:
            job()
        self.queue.clear()

    def work(self, milliseconds):
        def job():
            self.now_ms += milliseconds

        self.queue.append(job)


class Mark:
    def __init__(self):
        self.at_ms, self.line = None, None

    def record(self, line):
        self.line = line
        line.queue.append(lambda: setattr(self, "at_ms", line.now_ms))

    def synchronize(self):
        self.line.run()

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


def test_events_count_the_calls_work_and_not_what_was_queued_before():
    line = Line()
    line.work(7.0)

    def call():
        line.work(0.25)
        line.work(1.0)
        return "result"

    timed = _stopwatch.time_by_events(call, Mark, lambda: line)
    assert timed == (1_250_000, "result")
    assert line.queue == []  # waited for


def test_events_follow_the_current_stream_of_each_moment():
    lines = [Line(), Line()]
    marks = []

    def make_event():
        marks.append(Mark())
        return marks[-1]

    current = iter(lines)
    lines[0].run()
    lines[1].now_ms = 2.0
    # A call that leaves another stream current is timed from one to the other.
    lines[0].queue, lines[1].queue = [], []

    def call():
        lines[0].run()

    nanoseconds, _ = _stopwatch.time_by_events(call, make_event, lambda: next(current))
    assert [mark.line for mark in marks] == lines
    assert nanoseconds == 2_000_000


def test_the_clock_counts_on_cpu():
    watch = _stopwatch.stopwatch(torch.device("cpu"))
    assert watch is _stopwatch.time_by_clock
    nanoseconds, result = watch(lambda: 3)
    assert nanoseconds >= 0 and result == 3


def test_events_count_on_an_accelerator():
    watch = _stopwatch.stopwatch(torch.device("cuda"))
    assert watch is not _stopwatch.time_by_clock
