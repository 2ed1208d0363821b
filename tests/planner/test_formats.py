"""JSON of profiles, clusters and plans: round trips and hashes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.planner import CacheTiers, Cluster, LayerProfile, Plan, Profile
from pipetransformer.planner import search as find_plan
from tests.planner.documents import CLUSTER, PLAN, PROFILE, changed, text
from tests.planner.instances import cluster, equal_profile, layer, profile


def test_profile_survives_json():
    read = Profile.from_json(text(PROFILE))
    assert read.tied_layers == ((0, 2),)
    assert read.skips == ((0, 1), (0, 2))
    assert read.layers[1].forward_ns == (10, 40)
    assert json.loads(read.to_json()) == PROFILE
    assert Profile.from_json(read.to_json()) == read


@pytest.mark.parametrize("name", ["tied_layers", "skips"])
def test_an_empty_list_of_pairs_is_as_none(name):
    without = {field: value for field, value in PROFILE.items() if field != name}
    read = Profile.from_json(text({**without, name: []}))
    assert read == Profile.from_json(text(without))
    assert json.loads(read.to_json()) == without
    assert read.hash == Profile.from_json(text(without)).hash


def test_profile_hash_sees_every_field():
    base = Profile.from_json(text(PROFILE))
    assert base.hash == Profile.from_json(text(PROFILE)).hash
    for path, value in [
        (["name"], "other"),
        (["microbatch_samples", 1], 5),
        (["layers", 1, "weight_grad_ns", 0], 11),
        (["layers", 2, "trainable"], False),
        (["layers", 1, "activation_bytes_per_microbatch"], 0),
        (["layers", 1, "shared_activation_bytes"], 0),
        (["layers", 2, "forward_only_ns"], [1, 2]),
        (["tied_layers"], []),
        (["skips"], [[0, 1]]),
    ]:
        other = Profile.from_json(text(changed(PROFILE, path, value)))
        assert other.hash != base.hash


def test_cluster_survives_json():
    read = Cluster.from_json(text(CLUSTER))
    in_line = CacheTiers(host_bytes=1, host_record_ns=5, host_in_line=True)
    unusual = Cluster(devices_per_node=1, device_memory_bytes=1, cache=in_line)
    assert Cluster.from_json(unusual.to_json()) == unusual
    assert read.cache == CacheTiers(
        host_bytes=1, host_bytes_per_s=2, disk_bytes=3, disk_bytes_per_s=4
    )
    assert json.loads(read.to_json()) == CLUSTER
    assert Cluster.from_json(read.to_json()) == read
    bare = cluster(4)
    assert Cluster.from_json(bare.to_json()) == bare


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
    try:
        read = Profile.from_json(text(changed(PROFILE, ["layers", 0, field], value)))
    except ValueError as error:
        assert field in str(error) or "the number" in str(error)
    else:
        assert Profile.from_json(read.to_json()) == read


def test_plan_survives_json():
    plan = find_plan(equal_profile(6), cluster(2), global_batch=8, boundary=1)
    assert plan.schedule == "gpipe"
    assert plan.candidates[0].lost == "" and plan.candidates[1].lost != ""
    assert plan.profile_hash == equal_profile(6).hash
    assert Plan.from_json(plan.to_json()) == plan


def test_every_field_of_a_plan_survives_json_and_is_in_its_hash():
    plan = Plan.from_json(text(PLAN))
    content = json.loads(plan.to_json())
    assert content.pop("plan_hash") == plan.plan_hash
    assert content == PLAN
    assert Plan.from_json(plan.to_json()) == plan
    for path, value in [
        (["schedule"], "zb-h1"),
        (["bubble_fraction"], 0.5),
        (["transition", "terms_ns", "move"], 6),
        (["candidates", 0, "lost"], "slower"),
        (["refusals"], []),
        (["cluster_hash"], 6),
    ]:
        other = json.loads(plan.to_json())
        with pytest.raises(ValueError, match=r"plan plan_hash: expected .* content"):
            Plan.from_json(text(changed(other, path, value)))


def test_a_plan_written_by_hand_needs_little():
    names = ("num_replicas", "num_microbatches", "samples_per_microbatch")
    short = {"version": 1, "boundary": 0, "num_stages": 1, "cuts": [0, 3]}
    short.update(dict.fromkeys([*names, "global_batch"], 1))
    plan = Plan.from_json(text(short))
    assert plan.shape == (1, 1, 1) and plan.schedule == "gpipe"
    assert Plan.from_json(plan.to_json()) == plan


def test_profile_built_in_code_is_checked_too():
    with pytest.raises(ValueError, match=r"profile layers\[0\]: expected a LayerPro"):
        profile([3])
    with pytest.raises(ValueError, match="parameter_bytes: expected 0 to"):
        layer(0, parameters=-1)
    assert isinstance(layer(0), LayerProfile)
