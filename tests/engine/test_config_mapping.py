"""A config as plain values and back; texts of errors are interface."""

import dataclasses
import json
import math
import pathlib
from datetime import timedelta
from typing import get_args, get_origin, get_type_hints

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipetransformer as pt

ROOMS = {
    "plan": pt.PlanConfig,
    "pipe": pt.PipeConfig,
    "cache": pt.CacheConfig,
    "checkpoint": pt.CheckpointConfig,
    "autodp": pt.AutoDPConfig,
}
COUNTS = st.integers(1, 2**40)
SIZES = st.lists(COUNTS, min_size=1, max_size=3, unique=True).map(sorted)
DURATIONS = st.timedeltas(timedelta(milliseconds=1), timedelta(days=365))
SPECIAL = {
    "cuts": st.none() | st.lists(COUNTS).map(tuple),
    "microbatch_samples": SIZES,
    "hysteresis": st.floats(0, 1000),
    "optimizer_bytes_per_parameter_byte": st.floats(0, 64),
    "directory": st.sampled_from(["runs/a", "r\u00e4", pathlib.Path("runs")]),
    "disk_directory": st.sampled_from([None, "/scratch", pathlib.Path("d")]),
    "clip_grad_norm": st.none() | COUNTS | st.floats(1e-300, math.inf),
    "seed": st.integers(0, 2**63 - 1),
    "prepare_steps": st.integers(0, 99),
    "trial_steps": st.just(0),  # others go with some values of two more fields
    "transfer_bucket_bytes": st.integers(1, 2**32),
    "cached_groups": st.integers(0, 9),
    "interface": st.sampled_from([None, "eth0"]),
    "run_name": st.sampled_from(["", "a.b-c_1"]),
    "heartbeat_interval": st.timedeltas(
        timedelta(milliseconds=1), timedelta(milliseconds=9)
    ),
    "heartbeat_timeout": st.timedeltas(timedelta(seconds=1), timedelta(days=365)),
    "secret": st.none(),
    "profile": st.none() | st.sampled_from(["folder", "a/file.json"]),
    "trace": st.none() | st.just("runs/a"),
    "report": st.none() | st.sampled_from(["runs/a", pathlib.Path("runs")]),
    "devices": st.none() | st.lists(st.sampled_from(["cpu", "cuda:0"]), min_size=1),
}
KINDS = {int: COUNTS, bool: st.booleans(), timedelta: DURATIONS}


def values_of(hint):
    if get_origin(hint) is None:
        return KINDS[hint]
    inner = get_args(hint)
    if all(isinstance(each, str) for each in inner):
        return st.sampled_from(inner)
    kinds = [each for each in inner if each is not type(None)]
    return st.none() | st.one_of(*map(values_of, kinds))


def configs():
    def room(kind, **others):
        hints = get_type_hints(kind)
        fields = {
            n: SPECIAL[n] if n in SPECIAL else values_of(hint)
            for n, hint in hints.items()
            if n not in others
        }
        return st.builds(kind, **fields, **others)

    return room(pt.Config, **{name: room(kind) for name, kind in ROOMS.items()})


def toml_can_hold(value):
    if isinstance(value, dict):
        return all(isinstance(k, str) and toml_can_hold(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(toml_can_hold, value))
    return type(value) in (bool, int, float, str)


@given(configs())
def test_every_config_comes_back_through_json(config):
    plain = config.to_dict()
    assert toml_can_hold(plain)
    assert pt.Config.from_dict(plain) == config
    assert pt.Config.from_dict(json.loads(json.dumps(plain))) == config


def test_what_is_none_is_left_out_and_is_the_default():
    for kind in (pt.Config, *ROOMS.values()):
        for field in dataclasses.fields(kind):
            if type(None) in get_args(get_type_hints(kind)[field.name]):
                assert field.default is None, field.name
    assert "freeze_every" not in pt.Config().to_dict()
    assert pt.Config.from_dict({"freeze_every": None}) == pt.Config()


def test_a_part_is_enough():
    config = pt.Config.from_dict(
        {"plan": {"cuts": [0, 2]}, "autodp": {"store_timeout": 2}}
    )
    assert config == pt.Config(
        plan=pt.PlanConfig(cuts=(0, 2)),
        autodp=pt.AutoDPConfig(store_timeout=timedelta(seconds=2)),
    )


def test_the_secret_is_neither_written_nor_read():
    secret = "of 16 bytes or more"
    config = pt.Config(autodp=pt.AutoDPConfig(secret=secret))
    assert "secret" not in config.to_dict()["autodp"]
    with pytest.raises(ValueError) as caught:
        pt.Config.from_dict({"autodp": {"secret": secret}})
    assert str(caught.value) == (
        "Config.autodp.secret: expected it in the environment or as an argument of "
        "AutoDPConfig, got one in a mapping"
    )


@pytest.mark.parametrize(
    ("mapping", "kind", "text"),
    [
        ([], TypeError, "Config: expected a mapping, got []"),
        ({"plan": 3}, TypeError, "Config.plan: expected a mapping, got 3"),
        (
            {"pipe": {"slots": 3}},
            ValueError,
            "Config.pipe.slots: expected one of checkpoint, keep_freed_memory, "
            "num_slots, schedule, threads_per_stage, got an unknown name",
        ),
        (
            {"plan": {"num_stages": "2"}},
            TypeError,
            "Config.plan.num_stages: expected an int or None, got '2'",
        ),
        (
            {"plan": {"num_stages": 0}},
            ValueError,
            "Config.plan.num_stages: expected a positive number or None, got 0",
        ),
        ({"seed": "1"}, TypeError, "Config.seed: expected an int, got '1'"),
        (
            {"autodp": {"store_timeout": "2 s"}},
            TypeError,
            "Config.autodp.store_timeout: expected a number of seconds, got '2 s'",
        ),
        (
            {"autodp": {"store_timeout": math.inf}},
            ValueError,
            "Config.autodp.store_timeout: expected at most a year of seconds, got inf",
        ),
        (
            {"autodp": {"store_timeout": 0}},
            ValueError,
            "Config.autodp.store_timeout: expected at least a millisecond, got 0:00:00",
        ),
        (
            {"autodp": {"cached_groups": 1.0}},
            TypeError,
            "Config.autodp.cached_groups: expected an int, got 1.0",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_path(mapping, kind, text):
    with pytest.raises(kind) as caught:
        pt.Config.from_dict(mapping)
    assert str(caught.value) == text
    assert type(caught.value) is kind


def test_settings_of_other_kinds_of_numbers_and_paths_are_equal(tmp_path):
    one = pt.Config(
        seed=numpy.int64(3),
        plan=pt.PlanConfig(hysteresis=numpy.float64(0.5), cuts=[0, 4]),
        checkpoint=pt.CheckpointConfig(directory=tmp_path),
    )
    other = pt.Config(
        seed=3,
        plan=pt.PlanConfig(hysteresis=0.5, cuts=range(0, 8, 4)),
        checkpoint=pt.CheckpointConfig(directory=str(tmp_path)),
    )
    assert one == other and one.facts() == other.facts()
    assert toml_can_hold(one.to_dict())
