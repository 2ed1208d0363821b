"""Deadlines go by monotonic clocks: a time of day that jumps must change nothing."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What reads the time of day, or waits until one, in C++ and in Python.
OF_DAY = re.compile(
    r"system_clock|high_resolution_clock|gettimeofday|CLOCK_REALTIME|\btime\(nullptr\)"
    r"|\btime\.time\b|\btime_ns\(|from time import|datetime\.now|\.utcnow\(|\.today\("
)


def readers(sources):
    return [
        f"{path}: {line.strip()}"
        for path, text in sources
        for line in text.splitlines()
        if OF_DAY.search(line)
    ]


def test_no_source_of_the_library_reads_the_time_of_day():
    paths = [
        path
        for folder, endings in (
            ("csrc", (".h", ".cpp", ".cu")),
            ("pipetransformer", ".py"),
        )
        for path in sorted((ROOT / folder).rglob("*"))
        if path.name.endswith(endings)
    ]
    assert len(paths) > 300
    assert readers((p.relative_to(ROOT), p.read_text()) for p in paths) == []


@pytest.mark.parametrize(
    "line",
    [
        "auto end = std::chrono::system_clock::now() + timeout;",
        "clock_gettime(CLOCK_REALTIME, &now);",
        "end = time.time() + timeout",
        "now = datetime.now()",
    ],
)
def test_a_reader_of_the_time_of_day_is_found(line):
    assert readers([("x", line)]) == [f"x: {line}"]
