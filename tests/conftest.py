"""Markers, skips and per-test hygiene, declared once for the whole suite."""

import importlib.util
import os
import random

import pytest
import torch

# The store's server looks up the names of its clients; where no name server
# answers, each look-up would stall it for five seconds. Processes inherit this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Plans are to be the same on machines with few cores and with many; those of layers
# that take microseconds are to change shape.
os.environ.setdefault("PIPETRANSFORMER_SLOTS_AS_DEVICES", "1")

# With RERUN_DISTRIBUTED=1 a failed test of several processes gets a second try, but so
# many in a run at most: what fails beyond them has failed.
_RERUN = os.environ.get("RERUN_DISTRIBUTED") == "1"
_MOST_RERUNS = 3
_FAIL_WITHOUT = {"gpu": "FAIL_WITHOUT_CUDA", "distributed": "FAIL_WITHOUT_DISTRIBUTED"}


def pytest_configure(config):
    for line in (
        "gpu: needs a CUDA device",
        "distributed: starts several processes",
        "slow: takes more than a few seconds",
        "compat: interplay with other versions and packages",
    ):
        config.addinivalue_line("markers", line)
    if importlib.util.find_spec("hypothesis") is not None:  # tests/gpu goes without
        from hypothesis import settings

        settings.register_profile("no deadline", deadline=None)  # nothing is timed
        settings.load_profile("no deadline")
    if _RERUN:
        if not hasattr(config.option, "max_suite_reruns"):
            raise pytest.UsageError(
                "RERUN_DISTRIBUTED=1: expected a pytest-rerunfailures that can limit "
                "reruns (requirements/dev.txt), got none"
            )
        config.option.max_suite_reruns = _MOST_RERUNS
        config.option.rerun_show_tracebacks = True
    # Other programs share the cores; spinning intra-op threads would starve them.
    torch.set_num_threads(1)


def pytest_report_header(config):
    return f"torch {torch.__version__}, CUDA available: {torch.cuda.is_available()}"


def pytest_collection_modifyitems(items):
    if _RERUN:
        for item in items:
            if item.get_closest_marker("distributed") is not None:
                item.add_marker(pytest.mark.flaky(reruns=1))


def _missing(marker):
    if marker == "gpu" and not torch.cuda.is_available():
        return "no CUDA device"
    if marker == "distributed" and not torch.distributed.is_gloo_available():
        return "torch was built without gloo"
    return None


def pytest_runtest_setup(item):
    for marker, variable in _FAIL_WITHOUT.items():
        if item.get_closest_marker(marker) is None:
            continue
        reason = _missing(marker)
        if reason is None:
            continue
        if os.environ.get(variable) == "1":
            pytest.fail(f"{variable}=1 and {reason}")
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _keep_random_state():
    state, python_state = torch.get_rng_state(), random.getstate()
    yield
    torch.set_rng_state(state)
    random.setstate(python_state)
