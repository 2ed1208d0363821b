"""The demo's data, model and pre-training."""

import fcntl

import pytest
import torch

from tests.support.ranks import run_ranks
from vit_digits import (
    Pretraining,
    accuracy,
    build_vit,
    freeze_units,
    load_split,
    pretrained_vit,
)

TINY = Pretraining(share=0.1, epochs=1, blocks=1, width=8, heads=2)


def _weights(model):
    return [p.detach() for p in model.parameters()]


def _pretrained_sum(rank, folder):
    model = pretrained_vit(folder, seed=0, recipe=TINY, deadline_s=90.0)
    return sum(p.double().sum().item() for p in _weights(model))


def test_split_holds_out_40_percent_with_every_class_in_proportion():
    train, test = load_split()
    assert (len(train), len(test)) == (1078, 719)
    for part in (train, test):
        shares = part.tensors()[1].bincount(minlength=10) / len(part)
        assert shares.min() > 0.09
        assert shares.max() < 0.11


def test_split_is_the_same_in_every_call():
    for first, second in zip(load_split(), load_split(), strict=True):
        assert torch.equal(first.tensors()[0], second.tensors()[0])


def test_dataset_gives_inputs_and_targets_apart_as_together():
    train, _ = load_split()
    inputs, target = train[7]
    assert inputs.shape == (8, 8)
    assert torch.equal(inputs, train.inputs(7))
    assert torch.equal(target, train.targets(7))


def test_input_key_is_the_same_in_every_epoch():
    train, _ = load_split()
    assert train.input_key(5, 0) == train.input_key(5, 3) != train.input_key(6, 0)


def test_model_gives_logits_and_units_end_before_the_head():
    model = build_vit(blocks=12, width=8, heads=2)
    assert model(torch.zeros(3, 8, 8)).shape == (3, 10)
    assert freeze_units(model) == list(range(2, 14))
    assert len(model) == 14


def test_accuracy_is_one_value_per_row():
    outputs = torch.eye(10)[[3, 1, 4]]
    assert accuracy(outputs, torch.tensor([3, 1, 5])).tolist() == [1.0, 1.0, 0.0]


def test_pretraining_repeats_its_bits_and_leaves_the_random_state(tmp_path):
    state = torch.get_rng_state()
    first = pretrained_vit(tmp_path / "a", seed=0, recipe=TINY)
    second = pretrained_vit(tmp_path / "b", seed=0, recipe=TINY)
    assert torch.equal(state, torch.get_rng_state())
    for one, other in zip(_weights(first), _weights(second), strict=True):
        assert torch.equal(one, other)


def test_seed_changes_the_head_alone(tmp_path):
    first = pretrained_vit(tmp_path, seed=0, recipe=TINY)
    second = pretrained_vit(tmp_path, seed=1, recipe=TINY)
    for one, other in zip(_weights(first[:-1]), _weights(second[:-1]), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first[-1].classify.weight, second[-1].classify.weight)


def test_checkpoint_is_made_once_and_its_name_follows_the_recipe(tmp_path):
    pretrained_vit(tmp_path, seed=0, recipe=TINY)
    made = (tmp_path / TINY.file_name()).stat().st_mtime_ns
    pretrained_vit(tmp_path, seed=1, recipe=TINY)
    assert (tmp_path / TINY.file_name()).stat().st_mtime_ns == made
    assert len(list(tmp_path.glob("*.pt*"))) == 1
    assert TINY.file_name() != Pretraining().file_name()


@pytest.mark.distributed
def test_checkpoint_is_shared_by_processes_that_start_at_once(tmp_path):
    sums = run_ranks(_pretrained_sum, 3, tmp_path)
    assert len(set(sums)) == 1
    assert len(list(tmp_path.glob("*.pt*"))) == 1


def test_waiting_for_another_process_ends_at_the_deadline(tmp_path):
    lock = (tmp_path / TINY.file_name()).with_suffix(".lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="expected another process to finish"):
            pretrained_vit(tmp_path, seed=0, recipe=TINY, deadline_s=0.1)
