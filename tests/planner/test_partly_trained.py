"""Layers that train in part: only what trains has gradients, moments and journeys."""

import json

import pytest
import torch
from torch import nn

from pipetransformer import _C, planner
from pipetransformer.explanation import explain_plan
from pipetransformer.planner import Profile, native, search
from tests.planner.documents import PROFILE, changed, text
from tests.planner.instances import cluster, layer, profile


def adapters(num_layers=4, *, first=0, parameters=1000, trained=10):
    """Layers of which those from `first` on have an adapter."""
    return profile(
        [
            layer(
                k,
                parameters=parameters,
                trainable=k >= first,
                trainable_bytes=trained if k >= first else None,
            )
            for k in range(num_layers)
        ]
    )


def test_only_what_trains_has_gradients_and_moments():
    plan = search(adapters(), cluster(2), global_batch=8, cuts=(0, 2, 4))
    assert plan.num_replicas == 1 < plan.num_microbatches
    assert plan.bytes_per_stage == (2 * (1000 + 10 + 20 + 10),) * 2
    whole = search(
        profile([layer(k, parameters=1000) for k in range(4)]),
        cluster(2),
        global_batch=8,
        cuts=(0, 2, 4),
    )
    assert whole.bytes_per_stage == (2 * 5000,) * 2


def test_only_what_trains_is_reduced_between_replicas():
    machines = cluster(2, device_link_bytes_per_s=10**9)

    def reduced_ns(model):
        options = dict(global_batch=8, num_stages=1, replicas="all")
        plan = search(model, machines, **options)
        assert plan.num_replicas == 2
        (stage,) = native.step_costs(plan, model, machines).stages
        return stage.all_reduce_ns

    part = reduced_ns(adapters(parameters=10**6, trained=10**4))
    same = reduced_ns(adapters(parameters=10**4, trained=10**4))
    assert 0 < part == same


def test_new_replicas_are_told_what_trains_and_devices_take_all_along():
    model = adapters(8, first=2)
    shape = _C.planner.Shape
    sizes = [1030 * 2] * 4
    before = _C.planner.Placement(shape(4, 1, 4), [0, 2, 4, 6, 8], sizes)
    after = _C.planner.Placement(shape(2, 2, 4), [4, 6, 8], sizes[:2])
    moved = _C.planner.moves(
        native.profile(model), native.cluster(cluster(4)), before, after
    )
    assert moved.replica_bytes == 6 * (10 + 20)
    assert moved.device_bytes == 4 * (1000 + 20)


def test_an_older_file_trains_whole_layers_or_none():
    read = Profile.from_json(text(changed(PROFILE, ["layers", 1, "trainable"], False)))
    assert [x.gradient_bytes for x in read.layers] == [8, 0, 8]
    assert all(x.trainable_bytes is None for x in read.layers)


def test_a_file_keeps_what_trains_and_its_hash_tells():
    plain = Profile.from_json(text(PROFILE))
    fields = changed(PROFILE, ["layers", 0, "trainable_bytes"], 3)
    read = Profile.from_json(text(fields))
    assert [x.gradient_bytes for x in read.layers] == [3, 8, 8]
    assert json.loads(read.to_json()) == fields
    assert read.hash != plain.hash


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (9, "trainable_bytes: expected 0 to 8, got 9"),
        (-1, "trainable_bytes: expected 0 to 2"),
        ("3", "trainable_bytes: expected an integer, got '3'"),
    ],
)
def test_more_bytes_than_there_are_cannot_train(bad, said):
    with pytest.raises(ValueError, match=said):
        Profile.from_json(text(changed(PROFILE, ["layers", 0, "trainable_bytes"], bad)))
    with pytest.raises(ValueError, match="trainable_bytes: expected 0 to 0, got 3"):
        layer(0, parameters=8, trainable=False, trainable_bytes=3)


def test_the_planner_checks_what_it_is_given():
    wrong = native.profile(adapters())
    wrong.layers = [*wrong.layers[:3], _too_much(wrong.layers[3])]
    placed = _C.planner.Choice(
        _C.planner.Shape(1, 1, 1),
        _C.planner.ScheduleKind.GPIPE,
        _C.planner.PrefixPlacement.NONE,
        _C.planner.CacheTier.NONE,
        [0, 4],
    )
    work = _C.planner.Workload()
    work.global_batch = 1
    with pytest.raises(ValueError, match="layer 3 trainable_bytes: expected 0 to 1000"):
        _C.planner.step_costs(wrong, native.cluster(cluster(1)), work, placed)


def _too_much(native_layer):
    native_layer.trainable_bytes = 1001
    return native_layer


def test_measuring_counts_what_requires_gradients():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    found = planner.profile(model, torch.randn(4, 4), microbatch_samples=(1,))
    assert [x.parameter_bytes for x in found.layers] == [80, 80, 80]
    assert [x.gradient_bytes for x in found.layers] == [0, 16, 80]
    # Said only where it does not follow: files of other models stay as they were.
    assert [x.trainable_bytes for x in found.layers] == [None, 16, None]


def test_a_layer_whose_only_trained_parameter_is_counted_elsewhere():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    found = planner.profile(
        nn.Sequential(first, second), torch.randn(4, 4), microbatch_samples=(1,)
    )
    assert found.layers[1].trainable and found.layers[1].parameter_bytes == 16
    assert [x.gradient_bytes for x in found.layers] == [80, 0]


def test_the_explanation_says_how_much_trains():
    machines = cluster(2)
    model = adapters(first=2, parameters=10**7, trained=10**5)
    plan = search(model, machines, global_batch=8, boundary=2)
    said = "0.2 MB of 40.0 MB of parameters train; nothing does before layer 2"
    assert said in str(explain_plan(plan, model, machines))
    whole = profile([layer(k, parameters=10) for k in range(4)])
    plan = search(whole, machines, global_batch=8)
    assert "parameters train" not in str(explain_plan(plan, whole, machines))
