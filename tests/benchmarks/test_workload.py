"""The benchmarks' workload: model, pre-training, optimizer and schedule."""

import math
from dataclasses import replace

import pytest
import torch

from training.pretrain import BACKGROUND, Pretraining, augment
from training.workload import (
    BATCH_SIZE,
    EPOCHS,
    SETTINGS,
    UNITS,
    Settings,
    build_model,
    load_split,
    make_optimizer,
    make_scheduler,
    pretrained,
)

TINY = Settings(
    blocks=1,
    width=8,
    heads=2,
    pretraining=Pretraining(share=0.05, epochs=2, whole_epochs=1),
)


def _weights(model):
    return [p.detach() for p in model.parameters()]


def test_model_has_a_token_per_pixel_and_gives_logits():
    model = build_model(replace(SETTINGS, width=8, heads=2))
    images = torch.zeros(3, 8, 8)
    assert model[0](images).shape == (3, 64, 8)
    assert model(images).shape == (3, 10)
    assert len(model) == SETTINGS.blocks + 2


def test_units_end_at_every_block_and_leave_out_the_head():
    assert list(range(2, 14)) == UNITS
    assert UNITS[-1] == len(build_model()) - 1


def test_an_epoch_has_17_steps():
    assert math.ceil(len(load_split()[0]) / BATCH_SIZE) == 17


@pytest.mark.parametrize(
    "changed",
    [
        replace(TINY, width=16),
        replace(TINY, window=3),
        replace(TINY, pretraining=replace(TINY.pretraining, seed=1)),
        replace(TINY, pretraining=replace(TINY.pretraining, angle=0.2)),
    ],
)
def test_checkpoint_name_follows_the_settings(changed):
    assert changed.file_name() != TINY.file_name() == replace(TINY).file_name()


def test_head_depends_on_the_seed_alone_and_blocks_on_the_checkpoint(tmp_path):
    state = torch.get_rng_state()
    first, same, other = (pretrained(tmp_path, s, settings=TINY) for s in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert len(list(tmp_path.glob("*.pt*"))) == 1
    for one, two in zip(_weights(first), _weights(same), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(_weights(first[:-1]), _weights(other[:-1]), strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(first[-1].classify.weight, other[-1].classify.weight)


def test_pretraining_repeats_its_bits(tmp_path):
    first = pretrained(tmp_path / "a", 0, settings=TINY)
    second = pretrained(tmp_path / "b", 0, settings=TINY)
    for one, two in zip(_weights(first), _weights(second), strict=True):
        assert torch.equal(one, two)


def test_augmentation_changes_the_chosen_share_and_no_target():
    images = load_split()[0].tensors()[0]
    arguments = Pretraining(augmented=0.5)
    moved = augment(images, arguments, torch.Generator().manual_seed(0))
    changed = (moved != images).flatten(1).any(dim=1).float().mean()
    assert moved.shape == images.shape
    assert 0.4 < changed < 0.6


def test_augmentation_without_movement_gives_the_image_back():
    images = load_split()[0].tensors()[0][:20]
    still = Pretraining(augmented=1.0, angle=0.0, scale=0.0, shift=0.0)
    torch.testing.assert_close(augment(images, still, torch.Generator()), images)


def test_augmentation_fills_with_the_background():
    images = torch.full((50, 8, 8), BACKGROUND)
    moved = augment(images, Pretraining(augmented=1.0), torch.Generator())
    torch.testing.assert_close(moved, images)


def test_optimizer_has_two_rates_and_takes_only_the_given_parameters():
    model = build_model(TINY)
    params = list(model[2:].parameters())  # as with frozen layers in front
    blocks, head = make_optimizer(model, params).param_groups
    assert blocks["params"] == []
    assert len(head["params"]) == len(params)
    assert head["lr"] > blocks["lr"]
    assert head["fused"]


def test_schedule_warms_up_for_an_epoch_and_ends_near_zero():
    model = build_model(TINY)
    optimizer = make_optimizer(model, model.parameters())
    peak = optimizer.param_groups[0]["lr"]
    scheduler = make_scheduler(17 * EPOCHS, optimizer)
    rates = []
    for _ in range(17 * EPOCHS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates.index(max(rates)) == 16
    assert max(rates) == pytest.approx(peak)
    assert 0 < rates[-1] < 1e-3 * max(rates)
