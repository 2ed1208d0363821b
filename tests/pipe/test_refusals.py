"""What would give wrong gradients in silence is refused, in every dispatch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipetransformer.pipe import Pipe
from pipetransformer.pipe.skip import pop, skippable, stash

from .models import MODES, Functional, grads, linears

both = pytest.mark.parametrize("dispatch", ["serial", "threads"])
X = torch.randn(6, 5, dtype=torch.double, generator=torch.manual_seed(1))


def pipe_of(layers, mode="never", m=2, **options):
    return Pipe(nn.Sequential(*layers), m, mode, return_tensors=True, **options)


@both
@pytest.mark.parametrize("mode", MODES)
def test_parameter_of_another_stage_through_a_closure_is_refused(dispatch, mode):
    layers = linears(3)
    layers.insert(2, Functional(lambda x: x * layers[0].weight.sum()))
    pipe = pipe_of(layers, mode, dispatch=dispatch)
    with pytest.raises(RuntimeError, match="stage 2: expected every tensor that req"):
        pipe(X)
    pipe.close()


@both
def test_activation_kept_by_an_earlier_stage_is_refused(dispatch):
    kept = []

    def keep(x):
        kept.append(x)
        return x * 2

    layers = [*linears(1), Functional(keep), *linears(1)]
    layers.append(Functional(lambda x: x + kept[0]))
    pipe = pipe_of(layers, dispatch=dispatch, m=1)
    with pytest.raises(RuntimeError, match="got one from elsewhere"):
        pipe(X)
    pipe.close()


@skippable(stash="early")
class Stash(nn.Module):
    def forward(self, x):
        yield stash("early", x)
        return x


@skippable(pop="early")
class Pop(nn.Module):
    def forward(self, x):
        return x + (yield pop("early"))


@both
@pytest.mark.parametrize("mode", ["never", "except_last"])
def test_in_place_change_between_stash_and_pop_is_refused(dispatch, mode):
    layers = [*linears(1), Stash(), nn.ReLU(inplace=True), *linears(1), Pop()]
    pipe = pipe_of(layers, mode, dispatch=dispatch)
    with pytest.raises(RuntimeError, match="skip tensor from stage 1 to stage 4: exp"):
        pipe(X)
    pipe.close()


@both
def test_in_place_change_of_inputs_that_share_memory_is_refused(dispatch):
    layers = linears(1)
    layers.append(Functional(lambda x: (x, x[:, :2])))
    layers.append(Functional(lambda a, b: a.mul_(2)[:, :2] + b))
    pipe = pipe_of(layers, dispatch=dispatch)
    with pytest.raises(RuntimeError, match="inputs 0 and 1 of stage 2, micro-batch 0"):
        pipe(X)
    pipe.close()


@both
def test_leaf_input_changed_in_place_is_refused(dispatch):
    pipe = pipe_of([nn.ReLU(inplace=True), *linears(1)], m=1, dispatch=dispatch)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        pipe(X.clone().requires_grad_())
    pipe.close()


@both
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("profiled", [True, False])
def test_shared_parameter_counts_once_under_a_profiler(dispatch, mode, profiled):
    layers = linears(3)
    layers[2].weight = layers[0].weight
    plain = copy.deepcopy(nn.Sequential(*layers))
    pipe = pipe_of(layers, mode, m=3, dispatch=dispatch)
    loss = (pipe(X) ** 2).sum()
    if profiled:
        with torch.profiler.profile():
            loss.backward(retain_graph=True)
    else:
        loss.backward(retain_graph=True)
    (plain(X) ** 2).sum().backward()
    torch.testing.assert_close(grads(nn.Sequential(*layers)), grads(plain))
    pipe.close()


class Recomputed(nn.Module):
    """Recomputes itself, as some layers do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5).double(), nn.Dropout(0.5))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@both
@pytest.mark.parametrize("count", [1, 2])
def test_draws_within_torchs_own_checkpoint_are_refused(dispatch, count):
    layers = [Recomputed(), *linears(count - 1)]
    pipe = pipe_of(layers, m=count, dispatch=dispatch)
    with pytest.raises(RuntimeError, match=r"no random draws within torch\.utils\.c"):
        pipe(X)
    layers[0].inner[1].eval()  # no draws
    pipe(X).sum().backward()
    pipe.close()


@both
def test_draws_within_other_hooks_of_saved_tensors_are_not(dispatch):
    pipe = pipe_of([nn.Dropout(0.5), *linears(1)], dispatch=dispatch)
    with torch.autograd.graph.save_on_cpu():
        pipe(X).sum().backward()
    pipe.close()


@both
def test_pipe_inside_a_recomputed_layer_repeats_its_draws(dispatch):
    inner = Pipe(
        nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)),
        2,
        "never",
        return_tensors=True,
        dispatch=dispatch,
    )
    outer = pipe_of([Functional(inner)], "always", dispatch=dispatch)
    x = torch.ones(64, 8, dtype=torch.double, requires_grad=True)
    y = outer(x)
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)
    assert 0 < int((y == 0).sum()) < y.numel()
    outer.close()
    inner.close()


def test_output_that_contains_itself_is_refused():
    def nested(x):
        value = [x]
        value.append(value)
        return value

    pipe = pipe_of([Functional(nested), *linears(1)])
    with pytest.raises(ValueError, match="at most 100 levels of containers"):
        pipe(X)
    pipe.close()


def test_targets_that_require_grad_are_refused():
    pipe = pipe_of(linears(2), schedule="1f1b", loss=lambda o, t: ((o - t) ** 2).mean())
    with pytest.raises(ValueError, match="targets: expected tensors that do not req"):
        pipe(X, targets=X.clone().requires_grad_())
    pipe.close()


def test_loss_whose_gradient_is_undefined_delivers_none():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return None

    layers = linears(2)
    pipe = pipe_of(layers, schedule="1f1b", loss=lambda o, t: ((o - t) ** 2).mean())
    Stop.apply(pipe(X, targets=X)).backward()
    assert grads(nn.Sequential(*layers)) == [None] * 4
    pipe.close()


def test_own_forward_of_a_sequential_warns_that_it_is_not_called():
    class Doubled(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.warns(UserWarning, match="expected nn.Sequential's own forward"):
        Pipe(Doubled(*linears(2)), 2)


def test_own_workers_share_the_callers_threads():
    torch.set_num_threads(4)
    try:
        seen = []
        layers = [Functional(lambda x: seen.append(torch.get_num_threads()) or x)]
        layers += linears(1)
        for dispatch, expected in (("threads", 2), ("serial", 4)):
            pipe = pipe_of(layers, m=1, dispatch=dispatch)
            pipe(X)
            pipe.close()
            assert seen.pop() == expected
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(1)
