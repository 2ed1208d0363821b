"""What goes into and comes out of a pipeline, and the errors for what may not."""

import collections
import copy

import pytest
import torch
from torch import nn

from pipetransformer.pipe import (
    GPipe,
    Pipe,
    PipeSequential,
    WithDevice,
    Workers,
    is_checkpointing,
    is_recomputing,
)

from .models import MODES, Functional, dense, make_pipe

Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture(scope="module")
def workers():
    with Workers(4) as workers:
        yield workers


def rows_seen(pipe_of, rows):
    seen = []
    pipe = pipe_of(nn.Sequential(Functional(lambda x: (seen.append(len(x)), x)[1])))
    pipe(torch.zeros(rows, 2, requires_grad=True))
    return seen


@pytest.mark.parametrize(
    "rows, expected", [(7, [2, 2, 2, 1]), (9, [3, 3, 3]), (2, [1, 1]), (0, [0])]
)
def test_public_path_cuts_as_tensor_chunk(rows, expected):
    assert rows_seen(lambda m: Pipe(m, 4, "never"), rows) == expected


@pytest.mark.parametrize(
    "rows, expected", [(7, [2, 2, 2, 1]), (9, [3, 2, 2, 2]), (2, [1, 1]), (0, [0])]
)
def test_plan_path_cuts_at_most_one_row_apart(rows, expected):
    assert rows_seen(lambda m: make_pipe(m, 1, 4), rows) == expected


@pytest.mark.parametrize(
    "rows, expected",
    [(9, [3, 2, 2, 2]), (8, [2] * 4), (7, [3, 2, 2]), (3, [3]), (1, [1]), (0, [0])],
)
def test_plan_path_leaves_batch_norm_two_rows(rows, expected):
    seen = []
    note = Functional(lambda x: (seen.append(len(x)), x)[1])
    pipe = make_pipe(nn.Sequential(note, nn.BatchNorm1d(2)), 1, 4)
    pipe.train(rows > 1)
    pipe(torch.zeros(rows, 2, requires_grad=True))
    assert seen == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_several_inputs_and_spread_outputs(workers, mode, num_stages, num_microbatches):
    layers = nn.Sequential(
        Functional(lambda a, b: (a * b, b)),
        Functional(lambda a, b: [a + b, a.detach()]),
        Functional(lambda a, c: (a * c,)),
    )
    pipe = make_pipe(layers, num_stages, num_microbatches, mode, workers=workers)
    a = torch.randn(4, 3, requires_grad=True)
    b = torch.randn(4, 3, requires_grad=True)
    (actual,) = pipe(a, b)
    expected = (a * b + b) * (a * b).detach()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.sum(), [a, b]),
        torch.autograd.grad(expected.sum(), [a, b]),
    )


@pytest.mark.parametrize("mode", MODES)
def test_structures_keep_their_shape_and_gradients(workers, mode):
    layers = nn.Sequential(
        Functional(lambda d, k: {"x": d["x"] * k, "n": [d["i"], d["x"] + 1], "t": 5}),
        Functional(lambda d: Pair(d["x"] + d["n"][1], {"i": d["n"][0], "t": d["t"]})),
    )
    pipe = make_pipe(layers, 2, 2, mode, workers=workers)
    x = torch.randn(4, 3, requires_grad=True)
    scale = torch.tensor(3.0, requires_grad=True)
    k = torch.randn(4, 3)
    # A 0-dim tensor in a container goes to every micro-batch; its gradient adds up.
    layers.insert(0, Functional(lambda d, k: ({**d, "x": d["x"] * d["s"]}, k)))
    pipe = Pipe.from_plan(
        layers, cuts=[0, 1, 3], num_microbatches=2, checkpoint=mode, workers=workers
    )
    out = pipe({"x": x, "i": torch.arange(4), "s": scale}, k)
    assert isinstance(out, Pair) and out.second["t"] == [5, 5]
    assert torch.equal(out.second["i"], torch.arange(4))
    expected = x * scale * k + x * scale + 1
    torch.testing.assert_close(out.first, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.first.sum(), [x, scale]),
        torch.autograd.grad(expected.sum(), [x, scale]),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_keywords_go_to_the_first_layer(workers, mode, num_stages):
    layers = nn.Sequential(
        Functional(lambda *, x, flag: x * 2 if flag else x), Functional(torch.sin)
    )
    pipe = make_pipe(layers, num_stages, 2, mode, workers=workers)
    x = torch.randn(4, 3, requires_grad=True)
    torch.testing.assert_close(pipe(x=x, flag=True), torch.sin(2 * x))


@pytest.mark.parametrize("mode", MODES)
def test_other_values_are_handed_on_and_listed(workers, mode):
    layers = nn.Sequential(
        Functional(lambda x, n, s, flag: (n, x * n, None, s)),
        Functional(lambda n, x, none, s: (x + n, none, s, True)),
    )
    pipe = make_pipe(layers, 2, 2, mode, workers=workers)
    x = torch.randn(4, 3, requires_grad=True)
    y, none, text, flag = pipe(x, 3, "s", None)
    assert (none, text, flag) == ([None] * 2, ["s"] * 2, [True] * 2)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 3 * torch.ones(4, 3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_gradients_are_paired_with_outputs_by_position(workers, mode, num_microbatches):
    # Tensor without gradient first, non-tensor between, complex last.
    layers = nn.Sequential(
        nn.Linear(3, 3),
        Functional(lambda x: (x.detach(), 7, x.argmax(1), x * 2, torch.complex(x, x))),
        Functional(lambda d, n, i, x, c: (d, n, i, x * 3, c * c)),
    )
    plain = copy.deepcopy(layers)
    pipe = make_pipe(layers, 3, num_microbatches, mode, workers=workers)
    x = torch.randn(6, 3)
    d, n, i, y, c = pipe(x)
    assert n == [7] * num_microbatches
    assert [t.requires_grad for t in (d, i, y, c)] == [False, False, True, True]
    h = plain[0](x)
    (y.sum() + c.abs().sum()).backward()
    ((h * 6).sum() + (torch.complex(h, h) ** 2).abs().sum()).backward()
    torch.testing.assert_close(layers[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("mode", MODES)
def test_unused_output_gets_no_gradient(workers, mode):
    class NeverBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise AssertionError("ran without a gradient")

    split = Functional(lambda x: (x * 1, NeverBackward.apply(x)))
    layers = nn.Sequential(nn.Linear(3, 3), split)
    pipe = make_pipe(layers, 2, 2, mode, workers=workers)
    used, _ = pipe(torch.randn(4, 3))
    used.sum().backward()
    torch.testing.assert_close(layers[0].bias.grad, torch.full((3,), 4.0))


@pytest.mark.parametrize(
    "kind",
    [
        dict,
        collections.OrderedDict,
        lambda **items: collections.defaultdict(list, items),
    ],
)
def test_dicts_of_every_kind_are_cut_and_put_together(kind):
    def layer(x, given):
        assert type(given) is type(kind()) and len(given["w"]) == len(x) == 2
        return kind(y=x * given["w"], z=[given["w"]])

    x, w = torch.randn(8, 3), torch.randn(8, 3, requires_grad=True)
    pipe = make_pipe(nn.Sequential(Functional(layer)), 1, 4)
    given = kind(w=w)
    out = pipe(x, given)
    assert type(out) is type(given) and list(out) == ["y", "z"]
    assert torch.equal(out["y"], x * w) and torch.equal(out["z"][0], w)
    out["y"].sum().backward()
    torch.testing.assert_close(w.grad, x)
    assert dict(given) == {"w": w}, "the caller's own stays as it is"
    if isinstance(out, collections.defaultdict):
        assert out["nothing"] == []


def test_an_ordered_dict_keeps_its_order():
    given = collections.OrderedDict(a=torch.zeros(4, 1), b=torch.ones(4, 1))
    given.move_to_end("a")
    layer = Functional(lambda x, given: torch.cat([x, *given.values()], 1))
    out = make_pipe(nn.Sequential(layer), 1, 2)(torch.full((4, 1), 2.0), given)
    assert out[0].tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("num_stages", [0, 1])
def test_empty_sequential_returns_its_input(num_stages):
    pipe = Pipe(nn.Sequential(), 2, return_tensors=True)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert pipe(x) is x and pipe(x, y) == (x, y) and pipe.num_stages == 0


@pytest.mark.parametrize("training", [True, False])
def test_empty_sequential_returns_a_tensor_without_rows(training):
    x = torch.tensor(42.0)
    pipe = Pipe(nn.Sequential()).train(training)
    assert pipe(x).local_value() is x and pipe(x, x).local_value() == (x, x)
    with torch.no_grad():
        assert pipe.run([(x,)]) == [x]
    model = GPipe(nn.Sequential(), [], devices=[]).train(training)
    assert model(x) is x and model((x, x)) == (x, x)
    with pytest.raises(TypeError, match="expected Tensor"):
        model(42)


def test_stage_rule_flattens_one_level_and_keeps_hooked_children_whole():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda *_: None)
    pipe = Pipe(nn.Sequential(inner, nn.ReLU(), hooked, WithDevice(nn.ReLU(), "cpu")))
    assert [len(stage) for stage in pipe.partitions] == [3, 1, 1]
    assert pipe.devices == [torch.device("cpu")] * 3
    assert [stage.first_layer for stage in pipe.partitions] == [0, 3, 4]
    assert "partitions.0.0.weight" in pipe.state_dict()


class Spreading(PipeSequential):
    """A subclass of a program's own."""


@pytest.mark.parametrize("kind", [PipeSequential, Spreading])
def test_stage_rule_flattens_what_is_called_as_a_stage(kind):
    # Names as the removed Pipe had them; a child of several inputs among others.
    double = Functional(lambda x: (x, 2 * x))
    child = kind(nn.Linear(2, 2), double, Functional(torch.add))
    pipe = Pipe(nn.Sequential(child, nn.Linear(2, 2)), 2, return_tensors=True)
    names = [f"partitions.{j}.0.{name}" for j in (0, 1) for name in ("weight", "bias")]
    assert list(pipe.state_dict()) == names
    x = torch.randn(4, 2)
    torch.testing.assert_close(pipe(x), pipe[3](3 * child[0](x)))
    other = type("Other", (kind,), {"forward": lambda self, x: x})
    assert len(Pipe(nn.Sequential(other(nn.Linear(2, 2), nn.Tanh())))) == 1


@pytest.mark.parametrize("num_stages", [1, 3])
def test_run_gives_each_microbatchs_output(workers, num_stages):
    layers = dense(3, dtype=torch.float).eval()
    pipe = make_pipe(layers, num_stages, 2, workers=workers)
    batches = [(torch.randn(rows, 5),) for rows in (4, 4, 1, 0, 7)]
    with torch.no_grad():
        expected = [layers(*batch) for batch in batches]
        actual = pipe.run(batches)
        assert pipe.run([]) == []
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    with pytest.raises(RuntimeError, match="expected gradients to be off"):
        pipe.run(batches)
    with torch.no_grad(), pytest.raises(TypeError, match="expected a tuple or map"):
        pipe.run([torch.ones(2, 5)])


def test_run_is_bitwise_independent_of_the_plan(workers):
    layers = dense(4, 33, dtype=torch.float).eval()
    batches = [(torch.randn(8, 33),) for _ in range(4)]
    with torch.no_grad():
        seen = [
            torch.cat(make_pipe(layers, k, m, workers=workers).run(batches))
            for k, m in ((1, 1), (2, 3), (4, 8))
        ]
    assert all(torch.equal(seen[0], other) for other in seen)


@pytest.mark.parametrize("mode", MODES)
def test_context_of_the_caller_is_in_force_in_stages(workers, mode):
    seen = []

    def state(x):
        seen.append(
            (
                is_recomputing(),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
            )
        )
        return x * 1

    pipe = make_pipe(
        nn.Sequential(Functional(state), Functional(state)),
        2,
        2,
        mode,
        workers=workers,
    )
    x = torch.randn(4, 3, requires_grad=True)
    bf16 = torch.bfloat16
    with torch.no_grad():
        assert pipe(x).grad_fn is None
    assert set(seen) == {(False, False, False, False, bf16)}
    seen.clear()
    with torch.inference_mode():
        assert pipe(x).is_inference()
    assert set(seen) == {(False, False, True, False, bf16)}
    seen.clear()
    with torch.autocast("cpu", dtype=bf16):
        y = pipe(x)
    assert set(seen) == {(False, True, False, True, bf16)}
    y.sum().backward()
    assert set(seen) <= {(r, True, False, True, bf16) for r in (False, True)}
    assert any(s[0] for s in seen) == (mode != "never")


@pytest.mark.parametrize("mode", MODES)
def test_autocast_gives_the_plain_models_gradients(workers, mode):
    # A recomputation in float32 would be off by a hundredth.
    layers = dense(4, dtype=torch.float)
    plain = copy.deepcopy(layers)
    pipe = make_pipe(layers, 2, 2, mode, workers=workers)
    x = torch.randn(4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pipe(x).float().sum()
    loss.backward()
    for rows in x.chunk(2):  # casts serve one micro-batch, and add up in float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = plain(rows).float().sum()
        loss.backward()
    for a, b in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_saved_tensor_hooks_of_the_caller_see_the_stages(workers, mode):
    packed = []
    layers = dense(2)
    pipe = make_pipe(layers, 2, 2, mode, workers=workers)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(1) or t, lambda t: t
    ):
        loss = pipe(torch.randn(4, 5, dtype=torch.double)).sum()
    loss.backward()
    assert packed


COUNTS = {
    ("always", 1): 1,
    ("always", 4): 4,
    ("except_last", 1): 0,
    ("except_last", 4): 3,
    ("never", 4): 0,
}


@pytest.mark.parametrize("mode, chunks", COUNTS)
def test_number_of_checkpointed_cells(mode, chunks):
    flags = []

    def note(x):
        flags.append((is_checkpointing(), is_recomputing()))
        return x * 1

    pipe = Pipe(nn.Sequential(Functional(note)), chunks, mode, return_tensors=True)
    x = torch.randn(4, 2, requires_grad=True)
    expected = COUNTS[mode, chunks]
    pipe(x)
    assert flags.count((True, False)) == expected and len(flags) == chunks
    flags.clear()
    pipe(x).sum().backward()
    assert flags.count((False, True)) == expected
    assert (is_checkpointing(), is_recomputing()) == (False, False)
    flags.clear()
    pipe.eval()
    pipe(x)
    assert flags == [(False, False)] * chunks
    flags.clear()
    pipe.train()
    with torch.no_grad():
        pipe(x)
    assert flags.count((True, False)) == expected
    pipe.close()


@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_counts_a_microbatch_once(workers, mode):
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    pipe = make_pipe(layers, 2, 4, mode, workers=workers)
    pipe(torch.randn(8, 3)).sum().backward()
    assert layers[1].num_batches_tracked == 4
    # A norm that came after the first call counts once as well.
    pipe.partitions[0][0] = nn.BatchNorm1d(3)
    pipe(torch.randn(8, 3)).sum().backward()
    assert pipe.partitions[0][0].num_batches_tracked == 4


def test_deepcopy_and_pickle_train_on_their_own():
    pipe = Pipe(dense(), 2, return_tensors=True)
    x = torch.randn(4, 5, dtype=torch.double)
    expected = pipe(x)
    other = copy.deepcopy(pipe)
    torch.testing.assert_close(other(x), expected)
    other(x).sum().backward()
    assert all(p.grad is None for p in pipe.parameters())
    assert all(p.grad is not None for p in other.parameters())
