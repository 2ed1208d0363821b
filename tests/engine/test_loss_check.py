"""A loss that is no mean over rows is refused at the first batch, others are not."""

import collections
import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import pipetransformer as pt
from pipetransformer.loop.loss_check import checked_loss
from tests.engine.scenario import config, make_engine
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet

ROWS, CLASSES = 5, 3
cross_entropy = functional.cross_entropy


def outputs_and_targets(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(ROWS, CLASSES, generator=generator).to(dtype)
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    return outputs.requires_grad_(), targets


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_left_to_its_own_error(value):
    outputs, targets = outputs_and_targets()
    found = checked_loss(lambda y, t: cross_entropy(y * value, t), outputs, targets)
    assert not torch.isfinite(found)


def contrastive(outputs, targets):
    """InfoNCE of each row against all others: more rows, more negatives."""
    unit = functional.normalize(outputs, dim=1)
    return cross_entropy(unit @ unit.T / 0.1, torch.arange(len(unit)))


def gradient_penalty(outputs, targets):
    value = cross_entropy(outputs, targets)
    (slope,) = torch.autograd.grad(value * len(outputs), outputs, create_graph=True)
    return value + slope.square().sum(1).mean()


class Masked(nn.Module):
    """Masks outputs in place, as some losses do."""

    def forward(self, outputs, targets):
        outputs[:, 0] = -1.0
        return cross_entropy(outputs, targets)


class Settling(nn.Module):
    """Counts its calls, keeps a running centre, and lets both into the value."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.calls = 0
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, outputs, targets):
        self.calls += 1
        self.centre += outputs.detach().mean(0)
        return self.calls * self.scale * cross_entropy(outputs - self.centre, targets)


MEANS = {
    "mean": nn.CrossEntropyLoss(),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "sum over columns, mean over rows": lambda o, t: o.square().sum(1).mean(),
    "with a constant": lambda o, t: cross_entropy(o, t) + 3.0,
    "zero": lambda o, t: (o * 0).sum(),
    "about zero": lambda o, t: (o.sum(1) - o.flip(1).cumsum(1)[:, -1]).mean(),
    "gradient penalty": gradient_penalty,
    "in place": lambda o, t: Masked()(o * 1, t),
}
OTHER_MEANS = {
    "weighted mean": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2])),
    "mean of those not ignored": nn.CrossEntropyLoss(ignore_index=1),
    "own state": Settling(),
}
NO_MEANS = {
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "sum over a constant": lambda o, t: cross_entropy(o, t, reduction="sum") / 64,
    "mean and a hundredth of a sum": lambda o, t: (
        cross_entropy(o, t) + 0.01 * o.exp().sum()
    ),
    "contrastive": contrastive,
    "norm over all": lambda o, t: o.norm(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", {**MEANS, **OTHER_MEANS})
def test_means_pass_with_their_value_and_gradient(name, dtype, caplog):
    outputs, targets = outputs_and_targets(dtype)
    plain, _ = outputs_and_targets(dtype)
    loss = {**MEANS, **OTHER_MEANS}[name]
    if isinstance(loss, nn.CrossEntropyLoss):
        loss = loss.to(dtype)
    if isinstance(loss, Settling):
        loss = Settling()
    value = checked_loss(loss, outputs, targets)
    expected = (Settling() if name == "own state" else loss)(plain, targets)
    value.backward()
    expected.backward()
    assert torch.equal(value, expected) and torch.equal(outputs.grad, plain.grad)
    if name in MEANS:
        assert not caplog.records
    elif dtype != torch.bfloat16:  # of few rows within what it rounds
        (record,) = caplog.records
        assert "expected a mean over rows, got" in record.getMessage()
        assert (
            "depends on the number of replicas, and what evaluate"
            in record.getMessage()
        )


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2])


@pytest.mark.parametrize(
    ("loss", "right", "wrong"),
    [
        (
            nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
            lambda targets: CLASS_WEIGHTS[targets].sum(),
            lambda targets: (targets != 1).sum(),
        ),
        (nn.CrossEntropyLoss(ignore_index=1), lambda t: (t != 1).sum(), len),
    ],
)
def test_the_count_of_loss_weight_is_compared_with_halves(loss, right, wrong, caplog):
    outputs, targets = outputs_and_targets()
    checked_loss(loss, outputs, targets, right)
    assert not caplog.records
    checked_loss(loss, outputs, targets, wrong)
    assert "expected a mean over what loss_weight counts, got" in caplog.text


def test_a_half_of_weight_zero_has_no_loss(caplog):
    outputs, _ = outputs_and_targets()
    targets = torch.tensor([1, 1, 0, 2, 0])
    loss = nn.CrossEntropyLoss(ignore_index=1)
    checked_loss(loss, outputs, targets, lambda t: (t != 1).sum())
    assert not caplog.records


def test_one_row_has_no_halves(caplog):
    outputs, targets = outputs_and_targets()
    checked_loss(cross_entropy, outputs[:1], targets[:1])
    assert not caplog.records


# The least difference is within what bfloat16 rounds.
NO_MEAN_CASES = [
    (name, dtype)
    for name in NO_MEANS
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    if (name, dtype) != ("mean and a hundredth of a sum", torch.bfloat16)
]


@pytest.mark.parametrize(("name", "dtype"), NO_MEAN_CASES)
def test_what_depends_on_the_number_of_rows_is_refused(name, dtype):
    outputs, targets = outputs_and_targets(dtype)
    text = "loss: expected a mean over rows, got .* for 5 rows and .* twice; take red"
    with pytest.raises(ValueError, match=text):
        checked_loss(NO_MEANS[name], outputs, targets)


def test_a_loss_that_is_a_module_keeps_its_own_state():
    loss, (outputs, targets) = Settling(), outputs_and_targets()
    checked_loss(loss, outputs, targets).backward()
    assert loss.calls == 1 and loss.scale.grad is not None
    torch.testing.assert_close(loss.centre, outputs.detach().mean(0))


Pair = collections.namedtuple("Pair", "logits extra")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_structures_are_doubled_as_what_they_are(reduction):
    outputs, targets = outputs_and_targets()
    seen = []

    def loss(out, wanted):
        seen.append((type(out), type(wanted["pair"]), len(wanted["names"])))
        rows = cross_entropy(out.logits, wanted["pair"][0], reduction=reduction)
        return rows + out.extra

    tree = Pair(outputs, torch.tensor(0.5))
    wanted = {"pair": [targets, targets.float()], "names": list("abcde"), "kind": "x"}
    if reduction == "mean":
        checked_loss(loss, tree, wanted)
    else:
        with pytest.raises(ValueError, match="expected a mean over rows"):
            checked_loss(loss, tree, wanted)
    assert seen == [
        (Pair, list, ROWS),
        (Pair, list, 2 * ROWS),
        (Pair, list, ROWS // 2),
        (Pair, list, ROWS - ROWS // 2),
    ]


def noisy(draw):
    def loss(outputs, targets):
        return cross_entropy(outputs, targets) * (1 + draw())

    return loss


class Uncopied(nn.CrossEntropyLoss):
    def __deepcopy__(self, memo):
        raise TypeError("one of a kind")


def of_five(outputs, targets):
    return cross_entropy(outputs.view(5, 3), targets)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (noisy(lambda: torch.rand(())), "it draws random numbers"),
        (noisy(random.random), "it draws random numbers"),
        (noisy(np.random.rand), "it draws random numbers"),
        (Uncopied(), "it cannot be copied: TypeError: one of a kind"),
        (of_five, "it fails with each row twice or half of them: RuntimeError: shape"),
    ],
)
def test_a_loss_that_cannot_be_judged_is_named_and_runs(loss, why, caplog):
    outputs, targets = outputs_and_targets()
    with caplog.at_level(logging.WARNING):
        checked_loss(loss, outputs, targets).backward()
    (record,) = caplog.records
    assert f"loss: not checked to be a mean over rows: {why}" in record.getMessage()
    assert outputs.grad is not None


def test_targets_with_other_rows_cannot_be_judged(caplog):
    outputs, targets = outputs_and_targets()
    checked_loss(lambda o, t: cross_entropy(o, t[0]), outputs, (targets, torch.ones(7)))
    assert "a tensor with other than 5 rows" in caplog.text


def test_global_generators_are_as_one_call_leaves_them():
    """Also by a loss that draws the second time only."""
    calls = []

    def loss(outputs, targets):
        calls.append(len(outputs))
        if len(calls) > 1:
            torch.rand(3), random.random(), np.random.rand()
        return cross_entropy(outputs, targets)

    def states():
        return torch.get_rng_state(), random.getstate(), np.random.get_state()[1:3]

    before = states()
    checked_loss(loss, *outputs_and_targets())
    after = states()
    assert calls == [ROWS, 2 * ROWS, ROWS // 2, ROWS - ROWS // 2]
    assert torch.equal(before[0], after[0]) and before[1] == after[1]
    assert before[2][1] == after[2][1] and (before[2][0] == after[2][0]).all()


class Counted:
    """Counts how often it is called with how many rows."""

    def __init__(self, reduction="mean"):
        self.calls = []
        self.reduction = reduction

    def __call__(self, outputs, targets):
        self.calls.append(len(outputs))
        return cross_entropy(outputs, targets, reduction=self.reduction)


def train(loss, **settings):
    engine = make_engine(freeze=pt.freeze.Never(), loss=loss, config=config(**settings))
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 12):
                engine.step(batch)


def test_engine_asks_once_a_run():
    loss = Counted()
    train(loss)
    assert loss.calls == [12, 24, 6, 6, 12, 12, 12]


def test_engine_refuses_a_sum_before_any_step():
    before = model_of(make_engine(freeze=pt.freeze.Never()))
    loss = Counted("sum")
    engine = make_engine(freeze=pt.freeze.Never(), loss=loss)
    with pytest.raises(ValueError, match="loss: expected a mean over rows"), engine:
        for batch in engine.batches(ToySet(24), 12):
            engine.step(batch)
    assert loss.calls == [12, 24, 6, 6]
    now = model_of(engine)
    assert all(map(torch.equal, before.parameters(), now.parameters()))


def test_check_is_left_out_only_when_asked():
    loss = Counted("sum")
    train(loss, check_loss=False)
    assert loss.calls == [12, 12, 12, 12]


def refuse_in_two(rank):
    try:
        train(nn.CrossEntropyLoss(reduction="sum"))
    except (ValueError, pt.PeerFailure) as error:
        return str(error)


@pytest.mark.distributed
def test_a_sum_ends_every_replica():
    # A replica may hear of the other's refusal before it comes to its own.
    texts = run_ranks(refuse_in_two, 2)
    refused = ["loss: expected a mean over rows" in text for text in texts]
    assert any(refused) and None not in texts
