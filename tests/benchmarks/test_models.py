"""The published models: sizes, shapes, and one step through the pipeline."""

import argparse

import pytest
import torch
from torch import nn

import pipe_models
import unet_timeline
from harness.common import Row
from pipe.cuts import balanced_cuts, layer_costs
from pipe.live_bytes import LiveOutputs
from pipe.models import amoebanet_d, resnet101, unet
from unet_timeline import SCALES, VARIANTS, Runner, Variant


def millions(model):
    return sum(p.numel() for p in model.parameters()) / 1e6


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_models_have_their_published_sizes():
    with torch.device("meta"):
        assert millions(resnet101()) == pytest.approx(44.55, abs=0.01)  # torchvision
        # 82 M in GPipe's table 1; 1 + 2 + 18 + 2 + 1 layers.
        assert millions(amoebanet_d(filters=208)) == pytest.approx(82, rel=0.02)
        assert len(amoebanet_d()) == 24
        # 31 M with the up-convolutions of the paper's figure 1.
        assert millions(unet(depth=4, convolutions=2)) == pytest.approx(31, rel=0.01)


def test_classifiers_return_a_row_of_logits_per_image():
    images = torch.randn(2, 3, 64, 64)
    for model in (
        resnet101(width=4, classes=5),
        amoebanet_d(cells=3, filters=16, classes=5),
    ):
        assert model(images).shape == (2, 5)


def test_amoebanet_refuses_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="in threes and filters in sixteens, got 4"):
        amoebanet_d(cells=4)


def unet_gradients(direct):
    torch.manual_seed(0)
    model = unet(depth=2, convolutions=1, width=4, direct=direct).double()
    outputs = model(torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert outputs.shape == (2, 1, 8, 8)
    outputs.square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_carried_skips_compute_what_direct_ones_do():
    torch.testing.assert_close(unet_gradients(True), unet_gradients(False))


def test_costs_are_multiplications_and_elements():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    assert layer_costs(model, torch.randn(2, 4)) == [
        2 * 6 * (4 + 8),
        2 * 6 * 8,
        2 * (6 + 8),
    ]
    image = torch.randn(1, 3, 8, 8)
    up = nn.Sequential(nn.ConvTranspose2d(3, 2, 2, stride=2))
    assert layer_costs(up, image) == [8 * 2 * 16 * 16 + 3 * 8 * 8 * 2 * 2 * 2]
    assert layer_costs(nn.Sequential(nn.Conv2d(3, 2, 1)), image) == [128 * (3 + 8)]


def test_cuts_balance_and_refuse_more_stages_than_layers():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert balanced_cuts(model, torch.randn(1, 4), 2) == [0, 2, 4]
    with pytest.raises(ValueError, match="cuts: expected at most 4 stages, got 5"):
        balanced_cuts(model, torch.randn(1, 4), 5)


def test_live_outputs_are_counted_while_anyone_holds_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Flatten())
    live = LiveOutputs(model)
    with live.counting():
        outputs = model(torch.ones(2, 4))
        assert live.now == 2 * 4 * 4  # one storage, three outputs
        model(torch.ones(2, 4))  # dropped at once
    assert live.peak == 2 * 2 * 4 * 4
    loss = outputs.sum()
    del outputs
    assert live.now == 32  # kept for the backward of ReLU
    loss.backward()
    assert live.now == 0


TINY = SCALES["tiny"]


def gradients(variant):
    runner = Runner(variant, TINY, "cpu", 0)
    runner.step()
    return [p.grad for p in runner.model.parameters()]


def test_switches_of_the_timeline_do_not_change_the_gradients():
    expected = gradients(VARIANTS[0])
    for variant in VARIANTS[1:]:
        torch.testing.assert_close(gradients(variant), expected, rtol=1e-3, atol=1e-5)


def test_order_rule_bounds_the_memory_of_recomputed_activations():
    without, with_rule = (
        Runner(Variant("x", rule, True, False), TINY, "cpu", 0).peak_bytes()
        for rule in (False, True)
    )
    assert with_rule < 0.7 * without


def test_timeline_compares_with_the_first_variant():
    names = [variant.name for variant in unet_timeline.variants_on("cpu")]
    assert len(names) == len(VARIANTS) - 1
    rows = {n: Row(n, "step time", "s", (1.0 + k,)) for k, n in enumerate(names)}
    ratios = unet_timeline.speedups(rows, quick=True)
    assert [each.value for each in ratios] == pytest.approx(
        [1 / 2, 1 / 3, 1 / 4, 4 / 3]
    )


def test_models_through_the_pipeline_are_compared_at_equal_batch():
    args = argparse.Namespace(
        models=["resnet101"], stages=[2], microbatches=[1, 2], quick=True
    )
    names = [pipe_models.label("resnet101", *s) for s in pipe_models.shapes_of(args)]
    assert names == ["resnet101 plain", "resnet101 n=2 m=1", "resnet101 n=2 m=2"]
    rows = {n: Row(n, "step time", "s", (4.0 / (k + 1),)) for k, n in enumerate(names)}
    ratios = pipe_models.speedups(args, rows)
    assert [each.value for each in ratios] == pytest.approx([2.0, 3.0])


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (2, 1), (2, 2)])
def test_model_steps_plain_and_through_stages(stages, microbatches):
    built = []

    def build():
        built.append(amoebanet_d(cells=3, filters=16, classes=3).double())
        built[-1][0].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        return built[-1]

    workload = pipe_models.Workload(build, side=32, rows=4)
    pipe_models.make_step(workload, "cpu", 0, stages, microbatches)()
    torch.manual_seed(0)
    reference = build()
    rows = torch.randn(4, 3, 32, 32)
    for part in rows.chunk(microbatches):  # batch norm sees one micro-batch at a time
        (reference(part).square().mean() / microbatches).backward()
    for mine, plain in zip(built[0].parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)
