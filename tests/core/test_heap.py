"""Memory that is freed stays for the next allocation, as long as it is wanted."""

import os
import platform
import subprocess
import sys

import pytest

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="keeps freed memory under glibc alone"
)

# Takes and frees 40 MB ten times; tells how often the system had to give a page
# meanwhile. What was kept leaves holes between small blocks, which glibc goes on
# using: whether freed memory stays once it is no longer kept shows in blocks that are
# larger than all of them.
PROGRAM = """
import resource
import torch
from pipetransformer import _C

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def given(times, megabytes):
    before = faults()
    for _ in range(times):
        torch.ones(megabytes << 18)
    return faults() - before

def ten_times():
    return given(10, 40)

def held():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) // 1024

def in_turn():
    kept = _C.core.keep_freed_memory()
    ten_times()  # the first find no memory that is free
    while_kept, most = ten_times(), held()
    _C.core.give_back_freed_memory()
    given_back = most - held()
    ten_times()
    again = ten_times()
    _C.core.stop_keeping_freed_memory()
    print(kept, while_kept, given_back, again, given(2, 512))

in_turn()
"""
PAGES = (40 << 20) // 4096  # of one of the ten
LARGE_PAGES = (512 << 20) // 4096


def told(**environment):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    kept, *counts = ran.stdout.split()
    return kept == "True", *map(int, counts)


@glibc
def test_freed_memory_is_kept_until_it_is_given_back_and_then_kept_again():
    kept, while_kept, given_back_mb, again, ended = told()
    assert kept
    assert while_kept < PAGES // 10 and again < PAGES // 10
    assert given_back_mb >= 36
    assert ended >= 1.9 * LARGE_PAGES


@glibc
@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_MMAP_THRESHOLD_": "1048576"},
        {"MALLOC_TRIM_THRESHOLD_": "1048576"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1048576"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_the_environment_decides_where_it_says_something(environment):
    kept, while_kept, _, again, ended = told(**environment)
    assert not kept
    assert min(while_kept, again) >= 5 * PAGES
    assert ended >= 1.9 * LARGE_PAGES


@glibc
def test_other_tunables_do_not_count():
    assert told(GLIBC_TUNABLES="glibc.cpu.x86_ibt=off")[0]
