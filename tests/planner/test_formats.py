"""JSON of profiles, clusters and plans: round trips, and errors that name fields."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.planner import CacheTiers, Cluster, LayerProfile, Plan, Profile
from pipetransformer.planner import search as find_plan
from tests.planner.instances import cluster, equal_profile, layer, profile

PROFILE = {
    "version": 1,
    "name": "demo",
    "microbatch_samples": [1, 4],
    "layers": [
        {
            "name": f"{i}.Linear",
            "forward_ns": [10, 40],
            "input_grad_ns": [10, 40],
            "weight_grad_ns": [10, 40],
            "parameter_bytes": 8,
            "activation_bytes_per_sample": 4,
            "weight_grad_activation_bytes_per_sample": 4,
            "boundary_bytes_per_sample": 4,
            "trainable": True,
        }
        for i in range(3)
    ],
    "tied_layers": [[0, 2]],
}
CLUSTER = {
    "version": 1,
    "num_nodes": 2,
    "devices_per_node": 4,
    "device_memory_bytes": 1000,
    "device_link_bytes_per_s": 10,
    "device_link_latency_ns": 1,
    "network_bytes_per_s": None,
    "network_latency_ns": 2,
    "optimizer_bytes_per_parameter_byte": 2.0,
    "cache": {
        "host_bytes": 1,
        "host_bytes_per_s": 2,
        "disk_bytes": 3,
        "disk_bytes_per_s": 4,
    },
}


def changed(source, path, value):
    """A copy of ``source`` with the entry at ``path`` set, or removed if None."""
    copy = json.loads(json.dumps(source))
    at = copy
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(copy)


def test_profile_survives_json():
    read = Profile.from_json(json.dumps(PROFILE))
    assert read.tied_layers == ((0, 2),)
    assert read.layers[1].forward_ns == (10, 40)
    assert json.loads(read.to_json()) == PROFILE
    assert Profile.from_json(read.to_json()) == read


def test_profile_hash_sees_every_field():
    base = Profile.from_json(json.dumps(PROFILE))
    assert base.hash == Profile.from_json(json.dumps(PROFILE)).hash
    for path, value in [
        (["name"], "other"),
        (["microbatch_samples", 1], 5),
        (["layers", 1, "weight_grad_ns", 0], 11),
        (["layers", 2, "trainable"], False),
        (["layers", 2, "forward_only_ns"], [1, 2]),
        (["tied_layers"], []),
    ]:
        assert Profile.from_json(changed(PROFILE, path, value)).hash != base.hash


def test_cluster_survives_json():
    read = Cluster.from_json(json.dumps(CLUSTER))
    assert read.cache == CacheTiers(
        host_bytes=1, host_bytes_per_s=2, disk_bytes=3, disk_bytes_per_s=4
    )
    assert Cluster.from_json(read.to_json()) == read
    bare = cluster(4)
    assert Cluster.from_json(bare.to_json()) == bare


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["version"], 2, "profile version: expected 1, got 2"),
        (["version"], ..., "profile version: expected 1, got None"),
        (["name"], ..., "profile name: expected a value, got none"),
        (["name"], 3, "profile name: expected a string, got 3"),
        (["colour"], 1, "profile: expected known fields only, got 'colour'"),
        (["layers"], [], "profile layers: expected at least one layer, got none"),
        (["layers"], 7, "profile layers: expected a list, got 7"),
        (["layers", 1], 7, r"profile layers\[1\]: expected an object, got int"),
        (
            ["layers", 1, "forward_ns"],
            ...,
            r"profile layers\[1\] forward_ns: expected a value, got none",
        ),
        (
            ["layers", 1, "forward_ns"],
            [1],
            r"layers\[1\] forward_ns: expected one entry per micro-batch size \(2\), ",
        ),
        (
            ["layers", 1, "forward_ns", 0],
            -1,
            r"layer '1.Linear' forward_ns\[0\]: expected 0 to 2\*\*62, got -1",
        ),
        (
            ["layers", 1, "forward_ns", 0],
            1.5,
            r"layer '1.Linear' forward_ns\[0\]: expected an integer, got 1.5",
        ),
        (
            ["layers", 0, "parameter_bytes"],
            True,
            "layer '0.Linear' parameter_bytes: expected an integer, got True",
        ),
        (
            ["layers", 0, "trainable"],
            1,
            "layer '0.Linear' trainable: expected true or false, got 1",
        ),
        (
            ["microbatch_samples"],
            [4, 1],
            r"profile microbatch_samples: expected increasing sizes from 1, got \[4",
        ),
        (["microbatch_samples"], [], "microbatch_samples: expected increasing sizes"),
        (
            ["tied_layers"],
            [[0, 3]],
            "tied_layers: expected pairs of increasing layer indices below 3, got",
        ),
        (["tied_layers"], [[2, 0]], "tied_layers: expected pairs of increasing"),
    ],
)
def test_malformed_profile_is_refused_by_field(path, value, text):
    with pytest.raises(ValueError, match=text):
        Profile.from_json(changed(PROFILE, path, value))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["version"], True, "cluster version: expected 1, got True"),
        (
            ["devices_per_node"],
            0,
            r"cluster devices_per_node: expected 1 to 2\*\*62, got 0",
        ),
        (
            ["device_memory_bytes"],
            ...,
            "cluster device_memory_bytes: expected a value, got none",
        ),
        (
            ["device_link_bytes_per_s"],
            0,
            "cluster device_link_bytes_per_s: expected 1 to",
        ),
        (
            ["optimizer_bytes_per_parameter_byte"],
            -0.5,
            "optimizer_bytes_per_parameter_byte: expected a finite number from 0 to",
        ),
        (
            ["optimizer_bytes_per_parameter_byte"],
            "two",
            "optimizer_bytes_per_parameter_byte: expected a number, got 'two'",
        ),
        (["cache", "host_bytes"], -1, "cluster cache host_bytes: expected 0 to"),
        (["cache", "disk_bytes"], ..., "cluster cache disk_bytes: expected a value"),
    ],
)
def test_malformed_cluster_is_refused_by_field(path, value, text):
    with pytest.raises(ValueError, match=text):
        Cluster.from_json(changed(CLUSTER, path, value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "profile: expected JSON, got text with"),
        ("[1]", "profile: expected an object, got list"),
        ('{"version": NaN}', "profile: expected JSON, got text with the number NaN"),
        ("[" * 100_000, "profile: expected JSON, got text with"),
    ],
)
def test_text_that_is_no_profile_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Profile.from_json(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from(sorted(PROFILE["layers"][0])), json_values)
def test_any_value_in_a_layer_is_read_or_refused_by_name(field, value):
    text = changed(PROFILE, ["layers", 0, field], value)
    try:
        read = Profile.from_json(text)
    except ValueError as error:
        assert field in str(error) or "the number" in str(error)
    else:
        assert Profile.from_json(read.to_json()) == read


def demo_plan():
    return find_plan(equal_profile(6), cluster(2), global_batch=8, boundary=1)


def test_plan_survives_json():
    plan = demo_plan()
    assert plan.schedule == "gpipe"
    assert plan.candidates[0].lost == "" and plan.candidates[1].lost != ""
    assert plan.profile_hash == equal_profile(6).hash
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["num_replicas"], 7, r"plan plan_hash: expected .* \(of the content\)"),
        (["plan_hash"], -1, "plan plan_hash: expected at least 0, got -1"),
        (["plan_hash"], "x", "plan plan_hash: expected an integer, got 'x'"),
        (["num_stages"], 4, r"plan cuts: expected 5 layer indices \(num_stages"),
        (["num_stages"], 0, "plan num_stages: expected 1 to"),
        (["boundary"], 0, "plan cuts: expected increasing layer indices from 0"),
        (["schedule"], "1f1b", "plan schedule: expected 'gpipe', got '1f1b'"),
        (["checkpoint"], "no", "plan checkpoint: expected one of"),
        (["bytes_per_stage"], [1, 2, 3], "plan bytes_per_stage: expected"),
        (["candidates", 0, "lost"], 3, r"plan candidates\[0\] lost: expected a string"),
        (["reasons"], [1], r"plan reasons\[0\]: expected a string, got 1"),
        (["cuts"], ..., "plan cuts: expected a value, got none"),
    ],
)
def test_malformed_plan_is_refused_by_field(path, value, text):
    source = json.loads(demo_plan().to_json())
    with pytest.raises(ValueError, match=text):
        Plan.from_json(changed(source, path, value))


def test_profile_built_in_code_is_checked_too():
    with pytest.raises(ValueError, match=r"profile layers\[0\]: expected a LayerPro"):
        profile([3])
    with pytest.raises(ValueError, match="parameter_bytes: expected 0 to"):
        layer(0, parameters=-1)
    assert isinstance(layer(0), LayerProfile)
