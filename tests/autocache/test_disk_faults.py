"""Disks that fail, fill up or are slow: misses, one warning, and never an error."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.engine.test_disk_cache import SIZE

from .test_cache import SAMPLES

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
COMPILER = shutil.which("gcc") or shutil.which("cc")
SLOTS = 10
IN_SLAB = list(range(SLOTS))
ALL = list(range(SAMPLES))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "disk_faults.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    command += [str(HERE / "disk_faults.c"), "-o", str(path), "-ldl"]
    subprocess.run(command, check=True, timeout=100)
    return path


@pytest.fixture
def run(library, tmp_path):
    def case(name):
        """Return what a case found, and its warnings."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.autocache.disk_faults", name, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    return case


@pytest.mark.parametrize(
    ("case", "reason"),
    [("full", "No space left on device"), ("bad_writes", "Input/output error")],
)
def test_a_write_that_fails_ends_writing_with_one_warning(run, case, reason):
    found, warnings = run(case)
    assert found["stored"] == SLOTS
    assert found["again"] == 0
    assert found["hits"] == IN_SLAB
    assert found["full"] == 2 * (SAMPLES - SLOTS)
    assert warnings.count(f"nothing more is written on disk: {reason}") == 1


def test_reads_that_fail_are_misses_and_end_reading_with_one_warning(run):
    found, warnings = run("bad_reads")
    assert found == {
        "stored": SAMPLES,
        "hits": IN_SLAB,
        "late": SAMPLES - SLOTS,
        "after": IN_SLAB,
    }
    assert warnings.count("nothing more is read on disk: Input/output error") == 1


def test_a_few_reads_that_fail_are_misses_of_those_samples_only(run):
    found, warnings = run("few_bad_reads")
    assert found == {"hits": [], "late": 3, "after": ALL}
    assert "nothing more" not in warnings


def test_slow_reads_are_misses_of_those_samples_only(run):
    found, warnings = run("slow")
    assert found["hits"] == ALL[: SLOTS + 4]
    assert found["late"] == SAMPLES - SLOTS - 4
    assert found["after"] == ALL
    assert warnings.count("not read from disk in time") == 1


def test_nothing_waits_for_reads_that_hang(run):
    found, _ = run("hung")
    assert found == {"hits": IN_SLAB}


def test_records_that_a_slow_disk_reads_late_are_kept_all_the_same(run):
    found, _ = run("saved")
    assert found["slow"] == found["slow, read"] == SAMPLES
    assert found["hung"] == found["hung, read"] == SLOTS, "and nobody waits for ever"


def test_training_goes_on_where_reads_hang(run):
    found, _ = run("training")
    assert found == {"same": True, "late": True}


def test_the_rate_of_a_limited_disk_is_measured(run):
    found, _ = run("rates")
    assert 10**5 < found["limited"] <= 2 * 10**6 < found["as it is"]


def test_a_slow_disk_is_not_used_and_losses_are_the_same(run):
    fast, _ = run("never_slow")
    assert fast["tier"] == "disk" and fast["on_disk"][-1] > 0
    assert fast["hits"][-1] == SIZE
    assert "; on disk: read " in fast["text"] and fast["text"] in fast["report"]
    slow, _ = run("always_slow")
    assert slow["tier"] == "host" and sum(slow["on_disk"]) == 0
    assert 0 < slow["hits"][-1] < SIZE, "memory is used as before"
    assert "): recomputed; would turn above " in slow["text"]
    assert slow["losses"] == pytest.approx(fast["losses"], rel=1e-5)


def test_a_disk_that_becomes_slow_in_the_run_is_left(run):
    found, _ = run("slow_later")
    assert found["on_disk"][2] > 0 and found["on_disk"][-1] == 0
    assert found["tier"] == "host" and 0 < found["hits"][-1] < SIZE
    assert "): recomputed; would turn above " in found["text"]
