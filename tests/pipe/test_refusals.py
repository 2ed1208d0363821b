"""What would give wrong gradients in silence is refused, in every dispatch."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from pipetransformer.pipe import GPipe, Pipe, is_recomputing
from pipetransformer.pipe.skip import pop, skippable, stash

from .models import MODES, Functional, grads, linears, make_pipe, staged

both = pytest.mark.parametrize("dispatch", ["serial", "threads"])
X = torch.randn(6, 5, dtype=torch.double, generator=torch.manual_seed(1))


def pipe_of(layers, mode="never", m=2, **options):
    return Pipe(staged(*layers), m, mode, return_tensors=True, **options)


@both
@pytest.mark.parametrize("mode", MODES)
def test_parameter_of_another_stage_through_a_closure_is_refused(dispatch, mode):
    layers = linears(3)
    layers.insert(2, Functional(lambda x: x * layers[0].weight.sum()))
    pipe = pipe_of(layers, mode, dispatch=dispatch)
    with pytest.raises(RuntimeError, match="stage 2: expected every tensor that req"):
        pipe(X)
    pipe.close()


class Recurrent(nn.Module):
    """States that require grad, as many tutorials make them."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(1, 5, batch_first=True, dtype=torch.double)

    def forward(self, x):
        zeros = [torch.zeros(1, len(x), 5, dtype=x.dtype) for _ in range(2)]
        states = tuple(each.requires_grad_() for each in zeros)
        return self.cell(x[..., None], states)[0][:, -1]


class Force(nn.Module):
    """The gradient of an energy by positions that are a leaf of the layer's own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5, dtype=torch.double)

    def forward(self, x):
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.inner(at).tanh().square().sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return x + force


@both
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("kind", [Recurrent, Force])
def test_leaves_that_a_layer_makes_for_a_call_are_its_own(kind, m, mode, dispatch):
    layers = [*linears(1), kind(), *linears(1)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    plain(X).square().sum().backward()
    pipe = pipe_of(layers, mode, m, dispatch=dispatch)
    pipe(X).square().sum().backward()
    pipe.close()
    for mine, theirs in zip(grads(pipe), grads(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@both
def test_a_leaf_that_outlives_its_call_is_refused(dispatch):
    made = []

    def keep(x):
        made.append(torch.ones(5, dtype=x.dtype, requires_grad=True))
        return x * made[-1]

    pipe = pipe_of([*linears(1), Functional(keep)], dispatch=dispatch)
    with pytest.raises(RuntimeError, match="that the layer makes itself must not outl"):
        pipe(X)
    pipe.close()


WATCHES = {
    "hook": lambda leaf: leaf.register_hook(lambda grad: None),
    "post accumulate": lambda leaf: leaf.register_post_accumulate_grad_hook(
        lambda leaf: None
    ),
}


@both
@pytest.mark.parametrize("watch", WATCHES)
def test_a_leaf_of_a_layer_that_has_hooks_is_refused(watch, dispatch):
    def probe(x):
        noise = torch.zeros_like(x).requires_grad_()
        WATCHES[watch](noise)
        return x + noise

    pipe = pipe_of([*linears(1), Functional(probe)], dispatch=dispatch)
    with pytest.raises(RuntimeError, match="nor have hooks"):
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
        staged(nn.Dropout(0.5), nn.Dropout(0.5)),
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


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class Called(nn.Sequential):
    def __call__(self, x):
        return 2 * super().__call__(x)


def set_forward(layers):
    layers.forward = lambda x: x


EXTRAS = {
    "another one": Doubled,
    "another one, patched": set_forward,
    "a call of its own": Called,
    "a compiled call": lambda layers: layers.compile(backend="eager"),
    "hooks": lambda layers: layers.register_forward_hook(lambda *_: None),
    "parameters of its own": lambda layers: layers.register_parameter(
        "scale", nn.Parameter(torch.ones(()))
    ),
    "buffers of its own": lambda layers: layers.register_buffer("b", torch.ones(())),
}
MAKERS = {
    "Pipe": lambda layers: Pipe(layers, 2),
    "plan": lambda layers: make_pipe(layers, 2, 2),
    "GPipe": lambda layers: GPipe(layers, [2], devices=["cpu"]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("name", EXTRAS)
def test_what_a_sequential_is_besides_its_children_is_warned_of(name, make):
    add = EXTRAS[name]
    layers = nn.Sequential(*linears(2))
    if isinstance(add, type):
        layers = add(*layers)
    else:
        add(layers)
    found = name.split(",")[0]
    text = (
        f"expected nn.Sequential's own forward and nothing else, .* with {found}; the"
    )
    with pytest.warns(UserWarning, match=text):
        make(layers)


def test_several_extras_of_a_sequential_are_named_in_one_warning():
    layers = Doubled(*linears(2))
    layers.register_forward_pre_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="with another one and hooks; ") as caught:
        Pipe(layers, 2)
    assert len(caught) == 1


def test_plain_sequential_is_taken_without_a_warning(recwarn):
    for make in MAKERS.values():
        make(nn.Sequential(*linears(2)))
    assert not list(recwarn)


# --- recomputations with other parameters, other leaves, tangents ----------------


def others_of(module):
    return {
        name: (1.5 * parameter.detach()).requires_grad_()
        for name, parameter in module.named_parameters()
    }


@both
@pytest.mark.parametrize("mode", MODES)
def test_functional_call_is_right_or_refused(dispatch, mode):
    layers = linears(3)
    plain = copy.deepcopy(nn.Sequential(*layers))
    pipe = pipe_of(layers, mode, m=3, dispatch=dispatch)
    given, expected = others_of(pipe), others_of(plain)
    loss = functional_call(pipe, given, (X,)).square().sum()
    if mode == "never":
        loss.backward()
        functional_call(plain, expected, (X,)).square().sum().backward()
        for a, b in zip(given.values(), expected.values(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
    else:
        with pytest.raises(RuntimeError, match="expected the parameters of its forw"):
            loss.backward()
    assert grads(pipe) == [None] * 6
    pipe.close()


def flat_values(module):
    """Return one flat tensor, and parameters that are parts of it."""
    named = dict(module.named_parameters())
    flat = torch.cat([1.5 * p.detach().flatten() for p in named.values()])
    flat.requires_grad_()
    parts = flat.split([p.numel() for p in named.values()])
    given = {n: part.view_as(named[n]) for n, part in zip(named, parts, strict=True)}
    return flat, given


@both
@pytest.mark.parametrize("stages", [1, 3])
def test_values_of_functional_call_may_be_parts_of_one_tensor(dispatch, stages):
    layers = linears(3)
    plain = copy.deepcopy(nn.Sequential(*layers))
    cuts = [0, 3] if stages == 1 else [0, 1, 2, 3]
    pipe = Pipe.from_plan(
        nn.Sequential(*layers),
        cuts=cuts,
        num_microbatches=3,
        checkpoint="never",
        dispatch=dispatch,
    )
    flat, given = flat_values(pipe)
    expected, values = flat_values(plain)
    functional_call(pipe, given, (X,)).square().sum().backward()
    functional_call(plain, values, (X,)).square().sum().backward()
    assert flat.grad.ne(0).any()
    torch.testing.assert_close(flat.grad, expected.grad)
    found = []
    for module in (pipe, plain):  # one node of autograd gives both
        rows = torch.ones(2, 5, dtype=torch.double, requires_grad=True)
        biases = [n for n, _ in module.named_parameters() if n.endswith("bias")]
        given = dict(zip(biases, rows.unbind(), strict=False))
        functional_call(module, given, (X,)).square().sum().backward()
        found.append(rows.grad)
    torch.testing.assert_close(*found)
    assert found[0].ne(0).any(1).all()
    pipe.close()


@both
def test_a_value_that_is_computed_of_another_is_right_or_refused(dispatch):
    layers = [nn.Linear(5, 5, bias=False, dtype=torch.double) for _ in range(3)]
    plain = copy.deepcopy(nn.Sequential(*layers))

    def loss(module):
        named = dict(module.named_parameters())
        first, *_, last = named
        given = {last: (named[first] * 2).sigmoid()}
        return functional_call(module, given, (X,)).square().sum()

    def pipe_with(cuts):
        return Pipe.from_plan(
            nn.Sequential(*layers),
            cuts=cuts,
            num_microbatches=3,
            checkpoint="never",
            dispatch=dispatch,
        )

    loss(plain).backward()
    apart = pipe_with([0, 1, 2, 3])
    loss(apart).backward()
    for mine, other in zip(apart.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)
    apart.close()
    together = pipe_with([0, 3])
    with pytest.raises(RuntimeError, match="stage 0: expected parameters that are not"):
        loss(together)
    together.close()


def swap(layer):
    weight = layer.weight
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)


CHANGES = {
    "swapped": swap,
    "swapped for a frozen one": lambda layer: swap(layer.requires_grad_(False)),
    "frozen": lambda layer: layer.requires_grad_(False),
}


@both
@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("position", [0, 2])
def test_other_parameters_in_the_recomputation_are_refused(
    dispatch, mode, change, position
):
    layers = linears(3)
    pipe = pipe_of(layers, mode, m=3, dispatch=dispatch)
    loss = pipe(X).square().sum()
    change(layers[position])
    text = f"recomputation of stage {position}, .* got others, or some .*'never'"
    with pytest.raises(RuntimeError, match=text):
        loss.backward()
    layers[position].requires_grad_()
    pipe(X).square().sum().backward()  # goes on
    assert all(grad is not None for grad in grads(pipe))
    pipe.close()


@both
@pytest.mark.parametrize("skipped", [True, False], ids=["forward", "again"])
def test_recomputation_that_skips_a_layer_or_takes_one_more_is_refused(
    dispatch, skipped
):
    # As with layers that drop themselves by Python's random numbers.
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linears(1)[0]

        def forward(self, x):
            return x if is_recomputing() != skipped else self.inner(x)

    pipe = pipe_of([*linears(1), Sometimes()], "always", dispatch=dispatch)
    loss = pipe(X).sum()
    with pytest.raises(RuntimeError, match="recomputation of stage 1, micro-batch"):
        loss.backward()
    pipe.close()


@both
@pytest.mark.parametrize("mode", MODES)
def test_tensor_from_elsewhere_is_found_in_every_micro_batch(dispatch, mode):
    foreign = torch.randn(5, 5, dtype=torch.double, requires_grad=True)
    branch = Functional(lambda x: x @ foreign if x.sum() > 0 else x)
    pipe = pipe_of([branch, *linears(1)], mode, m=3, dispatch=dispatch)
    x = torch.ones(6, 5, dtype=torch.double)
    x[:4] = -1
    with pytest.raises(RuntimeError, match="stage 0: expected every tensor that req"):
        pipe(x)
    pipe(-x.abs()).sum().backward()
    pipe.close()


def dual_input(pipe):
    with forward_ad.dual_level():
        pipe(forward_ad.make_dual(X, torch.ones_like(X)))


def dual_parameter(pipe):
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(value, torch.ones_like(value))
            for name, value in others_of(pipe).items()
        }
        functional_call(pipe, duals, (X,))


def of_vmap(pipe):
    torch.func.vmap(pipe)(torch.stack([X, X]))


def of_vmap_without_gradients(pipe):
    with torch.no_grad():
        torch.func.vmap(pipe)(torch.stack([X, X]))


def of_vmap_in_run(pipe):
    with torch.no_grad():
        torch.func.vmap(lambda x: pipe.run([(x,)])[0])(torch.stack([X, X]))


TANGENTS = {
    "vmap": of_vmap,
    "vmap without gradients": of_vmap_without_gradients,
    "vmap in run": of_vmap_in_run,
    "vmap of a parameter": lambda pipe: torch.func.vmap(
        lambda values: functional_call(pipe, values, (X,))
    )({name: torch.stack([value, value]) for name, value in others_of(pipe).items()}),
    "dual input": dual_input,
    "dual parameter": dual_parameter,
    "jvp": lambda pipe: torch.func.jvp(pipe, (X,), (torch.ones_like(X),)),
    "grad": lambda pipe: torch.func.grad(lambda x: pipe(x).sum())(X),
    "grad of a parameter": lambda pipe: torch.func.grad(
        lambda values: functional_call(pipe, values, (X,)).sum()
    )(others_of(pipe)),
}


quiet = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@quiet
@both
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("differentiate", TANGENTS.values(), ids=TANGENTS.keys())
def test_tangents_are_refused(dispatch, mode, differentiate):
    pipe = pipe_of(linears(2), mode, dispatch=dispatch)
    with pytest.raises(RuntimeError, match="expected inputs and parameters without a"):
        differentiate(pipe)
    pipe(X).sum().backward()
    pipe.close()


@quiet
def test_one_stage_with_one_micro_batch_takes_tangents_as_the_plain_module():
    (layer,) = linears(1)
    pipe = pipe_of([layer], m=1)
    torch.testing.assert_close(
        torch.func.jvp(pipe, (X,), (torch.ones_like(X),)),
        torch.func.jvp(layer, (X,), (torch.ones_like(X),)),
    )


def test_layers_that_fsdp_shards_are_refused_by_name():
    code = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from pipetransformer.pipe import Pipe
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
for layer in layers:
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
try:
    Pipe(layers, 2, dispatch="serial")(torch.randn(4, 4))
except RuntimeError as error:
    assert "call fully_shard on the pipe, not on its layers" in str(error), error
else:
    raise AssertionError("not refused")
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


@both
@pytest.mark.parametrize("kind", [nn.LazyLinear, nn.LazyBatchNorm1d])
def test_lazy_layers_are_refused_until_they_are_initialised(dispatch, kind):
    def make():
        return nn.Sequential(
            nn.Linear(5, 4), kind(4) if kind is nn.LazyLinear else kind()
        ).double()

    pipe = Pipe(make(), 2, return_tensors=True, dispatch=dispatch)
    with pytest.raises(RuntimeError, match="expected initialised ones, got '.*' of a"):
        pipe(X)
    layers = make()
    layers(X)
    pipe = Pipe(layers, 2, return_tensors=True, dispatch=dispatch)
    pipe(X).sum().backward()
    assert all(grad is not None for grad in grads(pipe))
    pipe.close()


class Squared(nn.Module):
    def forward(self, weight):
        return weight * weight


def parametrized():
    layers = linears(2)
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Squared())
    return layers


CACHED = "expected to be called outside of torch.nn.utils.parametrize.cached"


def test_cached_parametrizations_work_with_one_dispatcher_and_are_else_refused():
    layers = parametrized()
    plain = copy.deepcopy(nn.Sequential(*layers))
    plain(X).square().sum().backward()
    for dispatch in ("auto", "threads"):
        pipe = pipe_of(layers, dispatch=dispatch)
        with parametrize.cached(), pytest.raises(RuntimeError, match=CACHED):
            pipe(X)
        with parametrize.cached(), torch.no_grad():
            pipe(X)
        pipe.close()
    pipe = pipe_of(layers, dispatch="serial")
    with parametrize.cached():
        pipe(X).square().sum().backward()
    torch.testing.assert_close(grads(nn.Sequential(*layers)), grads(plain))
    pipe.close()
    pipe = pipe_of(linears(2), dispatch="threads")
    with parametrize.cached():
        pipe(X).sum().backward()  # has nothing to cache
    pipe.close()


@both
@pytest.mark.parametrize("mode", ["except_last", "always"])
def test_cached_parametrizations_are_recomputed_outside_of_the_cache(dispatch, mode):
    layers = parametrized()
    plain = copy.deepcopy(nn.Sequential(*layers))
    plain(X).square().sum().backward()
    pipe = pipe_of(layers, mode, m=3, dispatch=dispatch)
    with parametrize.cached():
        output = pipe(X)
    output.square().sum().backward()
    torch.testing.assert_close(grads(nn.Sequential(*layers)), grads(plain))
    pipe.close()


@both
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_cached_parametrizations_are_refused_with_a_loss(dispatch, schedule):
    loss = nn.MSELoss()
    options = {"schedule": schedule, "loss": loss, "dispatch": dispatch}
    pipe = pipe_of(parametrized(), **options)
    with parametrize.cached(), pytest.raises(RuntimeError, match=CACHED):
        pipe(X, targets=X)
    pipe.close()


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


class OwnLoss(nn.Module):
    """Trains itself on a loss of its own, as greedy training does."""

    def __init__(self, detach):
        super().__init__()
        self.inner = nn.Linear(5, 5, dtype=torch.double)
        self.detach = detach

    def forward(self, x):
        if torch.is_grad_enabled() and not is_recomputing():
            self.inner(x.detach() if self.detach else x).square().mean().backward()
        return self.inner(x)


@pytest.mark.parametrize(
    ("mode", "dispatch"),
    [("always", "serial"), *((mode, "threads") for mode in MODES)],
)
def test_gradient_of_a_layers_own_loss_may_not_end_at_a_border(mode, dispatch):
    pipe = pipe_of([*linears(1), OwnLoss(detach=False)], mode, dispatch=dispatch)
    with pytest.raises(RuntimeError, match="expected layers that call backward"):
        pipe(X)
    pipe.close()


@both
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_of_a_layers_own_trains_it_where_inputs_are_detached(dispatch, mode):
    first, last = linears(1), OwnLoss(detach=True)
    pipe = pipe_of([*first, last], mode, dispatch=dispatch)
    pipe(X).sum().backward()
    pipe.close()
    plain = copy.deepcopy(nn.Sequential(*first, last))
    plain.zero_grad()
    for rows in X.chunk(2):
        plain(rows).sum().backward()
    for found, expected in zip(
        [*first[0].parameters(), *last.parameters()], plain.parameters(), strict=True
    ):
        torch.testing.assert_close(found.grad, expected.grad)
