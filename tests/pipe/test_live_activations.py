"""How many activations of a stage are alive: what the modes and rules promise."""

import weakref

import pytest
import torch
from torch import nn

from pipetransformer.testing.ablation import Ablation, ablate
from tests.support.ranks import run_ranks

from .models import MODES, Functional, linears, make_pipe

M = 6
NUM_STAGES = 3
every_dispatch = pytest.mark.parametrize("dispatch", ["serial", "threads"])
every_mode = pytest.mark.parametrize("mode", MODES)


class Kept(torch.autograd.Function):
    """Keeps a tensor of its own for backward, as a layer does, and counts it."""

    @staticmethod
    def forward(ctx, x, census, stage):
        activation = x + 1
        ctx.save_for_backward(activation)
        census.add(stage, activation)
        return activation * 2

    @staticmethod
    def backward(ctx, grad):
        (activation,) = ctx.saved_tensors
        return grad * 2 + 0 * activation, None, None


class Census:
    """Live activations by stage; `most` is the largest number seen at once."""

    def __init__(self):
        self._refs = [[] for _ in range(NUM_STAGES)]
        self.most = [0] * NUM_STAGES

    def layers(self):
        return nn.Sequential(
            *[
                nn.Sequential(
                    *linears(1), Functional(lambda x, j=j: Kept.apply(x, self, j))
                )
                for j in range(NUM_STAGES)
            ]
        )

    def add(self, stage, activation):
        # Each stage adds to its own list, from one thread at a time.
        self._refs[stage].append(weakref.ref(activation))
        self.most[stage] = max(self.most[stage], self.alive()[stage])

    def alive(self):
        return [sum(ref() is not None for ref in refs) for refs in self._refs]

    def start_again(self):
        self.most = [0] * NUM_STAGES


def rows():
    return torch.randn(M, 5, dtype=torch.double)


def make(census, mode, dispatch, **options):
    return make_pipe(census.layers(), NUM_STAGES, M, mode, dispatch=dispatch, **options)


@every_mode
@every_dispatch
def test_forward_keeps_the_microbatches_that_are_not_checkpointed(mode, dispatch):
    census = Census()
    pipe = make(census, mode, dispatch)
    y = pipe(rows())
    kept = {"never": M, "except_last": 1, "always": 0}[mode]
    assert census.alive() == [kept] * NUM_STAGES
    assert census.most == [M if mode == "never" else 1] * NUM_STAGES
    assert y.requires_grad
    pipe.close()


def most_in_backward(mode, dispatch, order_rule):
    census = Census()
    pipe = make(census, mode, dispatch)
    ablate(pipe, Ablation(order_rule=order_rule))
    loss = pipe(rows()).sum()
    census.start_again()
    loss.backward()
    assert census.alive() == [0] * NUM_STAGES
    pipe.close()
    return census.most


@pytest.mark.parametrize("mode", ["except_last", "always"])
@every_dispatch
def test_backward_keeps_one_recomputed_microbatch_under_the_order_rule(mode, dispatch):
    assert most_in_backward(mode, dispatch, True) == [1] * NUM_STAGES


def without_the_rule(_rank, mode, dispatch):
    return most_in_backward(mode, dispatch, False)


@pytest.mark.parametrize("mode", ["except_last", "always"])
@every_dispatch
def test_all_recomputed_microbatches_are_alive_without_the_order_rule(mode, dispatch):
    # In a process of its own: one dispatcher once took the columns in an order of
    # their recomputations and used what it had already let go.
    (most,) = run_ranks(without_the_rule, 1, mode, dispatch)
    assert most == [M] * NUM_STAGES  # the one that is kept included


@every_dispatch
def test_backward_frees_each_microbatch_when_its_cell_is_over(dispatch):
    census = Census()
    left = []

    class Note(torch.autograd.Function):
        """Behind everything in the backward of a cell of the first stage."""

        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            left.append(census.alive())
            return grad

    layers = census.layers()
    layers[0].insert(0, Functional(Note.apply))
    pipe = make_pipe(layers, NUM_STAGES, M, "never", dispatch=dispatch)
    pipe(rows().requires_grad_()).sum().backward()
    pipe.close()
    # The stages above are further, or in cells of the same clock at least.
    for done, alive in enumerate(left):
        assert alive[0] <= M - done
        assert max(alive[1:]) <= M - 1 - done
    assert len(left) == M


@every_mode
@every_dispatch
def test_1f1b_keeps_fewer_microbatches_than_gpipe(mode, dispatch):
    census = Census()
    pipe = make(
        census, mode, dispatch, schedule="1f1b", loss=lambda y, t: (y * t).mean()
    )
    loss = pipe(rows(), targets=rows())
    expected = [NUM_STAGES - j for j in range(NUM_STAGES)]
    if mode == "never":
        assert census.most == expected  # GPipe: M at every stage
    else:
        assert all(a <= b for a, b in zip(census.most, expected, strict=True))
    assert census.alive() == [0] * NUM_STAGES and loss.requires_grad
    pipe.close()


@every_dispatch
def test_zb_h1_keeps_no_more_microbatches_than_stages(dispatch):
    census = Census()
    pipe = make(
        census, "never", dispatch, schedule="zb-h1", loss=lambda y, t: (y * t).mean()
    )
    loss = pipe(rows(), targets=rows())
    assert min(census.most) > 0 and max(census.most) <= NUM_STAGES < M
    assert census.alive() == [0] * NUM_STAGES and loss.requires_grad
    pipe.close()


@every_dispatch
def test_retained_graph_keeps_its_activations_until_it_is_dropped(dispatch):
    census = Census()
    pipe = make(census, "never", dispatch)
    loss = pipe(rows()).sum()
    loss.backward(retain_graph=True)
    assert census.alive() == [M] * NUM_STAGES
    loss.backward()
    assert census.alive() == [0] * NUM_STAGES
    pipe.close()
