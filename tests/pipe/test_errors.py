"""Every refusal of the pipe room, by its text."""

import collections

import pytest
import torch
from torch import nn

from pipetransformer.data.structures import tensors_of
from pipetransformer.pipe import Pipe, Workers

from .models import MODES, Functional, dense, make_pipe, staged


class Text:
    def __str__(self):
        return "never"


def test_chunks_and_checkpoint_are_coerced():
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), 4.0, Text())
    assert (pipe.chunks, pipe.checkpoint) == (4, "never")
    assert type(pipe.chunks) is int and type(pipe.checkpoint) is str


@pytest.mark.parametrize("chunks", [0, -1])
def test_chunks_must_be_positive(chunks):
    with pytest.raises(ValueError, match=f"chunks: expected at least 1, got {chunks}"):
        Pipe(nn.Sequential(), chunks)
    with pytest.raises(ValueError, match="num_microbatches: expected at least 1, got"):
        make_pipe(dense(), 2, chunks)


def test_unknown_mode_is_refused():
    text = "checkpoint is not one of 'always', 'except_last', or 'never'"
    with pytest.raises(ValueError, match=text):
        Pipe(nn.Sequential(), 1, "sometimes")
    with pytest.raises(ValueError, match=text):
        make_pipe(dense(), 2, 2, "sometimes")


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.ModuleList(), None])
def test_only_a_sequential_is_accepted(module):
    with pytest.raises(TypeError, match="module must be nn.Sequential to be part"):
        Pipe(module)


def test_duplicate_children_are_refused():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="module with duplicate children is not supp"):
        Pipe(nn.Sequential(layer, nn.ReLU(), layer))


def test_child_on_two_devices_is_refused():
    child = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="should have all parameters on a single dev"):
        Pipe(nn.Sequential(child))


def test_parameter_shared_across_devices_is_refused():
    # CPU twin: only a plan can claim two devices for one CPU parameter.
    a = nn.Linear(2, 2, device="meta")
    b = nn.Linear(2, 2)
    b.weight = a.weight
    with pytest.raises(ValueError, match="on a single device"):
        Pipe(nn.Sequential(a, b))


@pytest.mark.parametrize("cuts", [[], [0], [0, 3], [1, 4], [0, 2, 2, 4], [0, 3, 2, 4]])
def test_cuts_must_rise_over_all_layers(cuts):
    with pytest.raises(ValueError, match="cuts: expected rising layer indices from 0"):
        Pipe.from_plan(dense(), cuts=cuts, num_microbatches=1)


def test_devices_and_workers_must_fit_the_stages():
    with pytest.raises(
        ValueError, match=r"devices: expected one per stage \(2\), got 1"
    ):
        make_pipe(dense(), 2, 2, devices=[torch.device("cpu")])
    with pytest.raises(ValueError, match="expected parameters on meta, got one on cpu"):
        make_pipe(dense(), 1, 2, devices=[torch.device("meta")])
    with (
        Workers(1) as workers,
        pytest.raises(
            ValueError, match=r"workers: expected at least one per stage \(2\), got 1"
        ),
    ):
        make_pipe(dense(), 2, 2, workers=workers)


def test_number_of_stages_must_not_change_after_the_first_call():
    pipe = make_pipe(dense(), 2, 2)
    pipe(X)
    pipe.partitions.pop(1)
    with pytest.raises(ValueError, match="partitions: expected 2 stages as when the"):
        pipe(X)
    pipe.close()


X = torch.zeros(2, 5, dtype=torch.double)


@pytest.mark.parametrize("args", [(), (1,), ("x",), ([1],), ({"x": None},)], ids=str)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("chunks", [1, 2])
def test_calls_without_a_tensor_are_refused(args, num_stages, chunks):
    with pytest.raises(TypeError, match="inputs: expected at least one tensor among"):
        make_pipe(dense(), num_stages, chunks)(*args)


@pytest.mark.parametrize(
    "args", [([X],), (((X,),),), ([X], [X]), ({"x": X},)], ids=["list", "deep", "", "d"]
)
def test_containers_alone_are_refused_but_for_pipelines_of_a_plan(args):
    class First(nn.Module):
        def forward(self, *given):
            return tensors_of(given)[0] + 1

    with pytest.raises(TypeError, match="inputs: expected at least one tensor among"):
        Pipe(staged(First(), nn.ReLU()), 2)(*args)
    pipe = make_pipe(nn.Sequential(First(), nn.ReLU()), 2, 2)
    assert torch.equal(pipe(*args), X + 1)
    pipe.close()


@pytest.mark.parametrize("num_stages, chunks", [(1, 1), (2, 2)])
def test_inputs_must_have_rows_and_be_on_the_first_device(num_stages, chunks):
    pipe = make_pipe(dense(), num_stages, chunks)
    with pytest.raises(RuntimeError, match="inputs: expected tensors with rows"):
        pipe(torch.tensor(1.0))
    with pytest.raises(
        ValueError,
        match="All inputs should be on the same device as the first partition",
    ):
        pipe(X.to("meta"))


def test_different_numbers_of_microbatches_are_refused():
    pipe = make_pipe(nn.Sequential(Functional(torch.add), nn.ReLU()), 2, 4)
    with pytest.raises(RuntimeError, match="Found different number of chunks"):
        pipe(torch.zeros(4, 2), torch.zeros(3, 2))
    pipe.close()


def test_rows_that_would_meet_others_are_refused():
    """Eight beside seven are two by two, and two beside one in the last."""
    pipe = make_pipe(nn.Sequential(Functional(torch.add), nn.ReLU()), 2, 4)
    text = "inputs: expected as many rows, or the same multiple .*, got 2 of 7 rows be"
    with pytest.raises(ValueError, match=text + "side 2 of 8 in micro-batch 0"):
        pipe(torch.zeros(8, 2), torch.zeros(7, 2))
    repeated = Functional(lambda x, y: x + y.view(len(x), -1, 2).sum(1))
    more = make_pipe(nn.Sequential(repeated, nn.ReLU()), 2, 4)
    x, y = torch.rand(8, 2), torch.rand(24, 2)
    assert torch.equal(more(x, y), x + y.view(8, 3, 2).sum(1))
    more.close()
    pipe.close()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torch.Tensor.to_sparse, "sparse"),
        (torch.Tensor.to_sparse_csr, "sparse"),
        (lambda x: torch.nested.nested_tensor([x[:1], x[1:]]), "nested"),
        (
            lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
            "nested",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch calls some of these beta
def test_what_has_no_rows_to_cut_is_refused(make, kind):
    pipe = make_pipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2, 2)
    with pytest.raises(ValueError, match=f"inputs: expected dense .* a {kind} one"):
        pipe(make(torch.ones(4, 2)))
    assert pipe(torch.ones(4, 2)).shape == (4, 2)
    pipe.close()


class Named(collections.UserDict):
    """A mapping of a class that nobody knows how to make anew."""


def test_mappings_that_cannot_be_cut_are_refused():
    layers = nn.Sequential(Functional(lambda x, w: x * w["w"]), nn.ReLU())
    x, w = torch.rand(8, 2), torch.rand(8, 2)
    for chunks in (1, 4):
        pipe = make_pipe(layers, 2, chunks)
        if chunks == 1:
            assert torch.equal(pipe(x, Named(w=w)), x * w)
            continue
        for value in (Named(w=w), [{"a": Named(w=[w])}]):
            with pytest.raises(
                TypeError, match="inputs: .* a Named with tensors; pass"
            ):
                pipe(x, value)
        pipe.close()
    plain = make_pipe(nn.Sequential(Functional(lambda x, w: x * w["w"])), 1, 4)
    assert torch.equal(plain(x, Named(w=2)), 2 * x)


@pytest.mark.parametrize("args", [(X, X), ()], ids=["many", "keyword"])
def test_wrong_arguments_surface_as_the_layers_own_error(args):
    pipe = make_pipe(dense(), 2, 2)
    with pytest.raises(TypeError, match="forward|Sequential"):
        pipe(*args, **({} if args else {"other": X}))
    pipe.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("position, num_stages", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_stage_output_needs_a_tensor(mode, position, num_stages, chunks):
    layers = [nn.Linear(5, 5, dtype=torch.double), nn.Identity()]
    layers[position] = Functional(lambda x: ("a", 3))
    if num_stages == 1:
        layers = layers[:1]
    pipe = make_pipe(nn.Sequential(*layers), num_stages, chunks, mode)
    with pytest.raises(
        TypeError, match=rf"output of stage {position}: expected at least one tensor"
    ):
        pipe(X)
    pipe.close()


@pytest.mark.parametrize("num_stages, chunks", [(1, 1), (1, 2), (2, 2)])
def test_outputs_must_have_rows(num_stages, chunks):
    layers = nn.Sequential(nn.Identity(), Functional(lambda x: x.sum()))
    pipe = make_pipe(layers, num_stages, chunks)
    with pytest.raises(RuntimeError, match="output 0: expected a tensor with rows"):
        pipe(X)
    pipe.close()


@pytest.mark.parametrize("other", [None, "text"])
def test_kinds_must_not_differ_between_microbatches(other):
    def fn(x):
        return x, (x if x[0, 0] > 0 else other)

    pipe = make_pipe(nn.Sequential(nn.Identity(), Functional(fn)), 2, 2)
    with pytest.raises(TypeError, match="expected the same kinds of values from every"):
        pipe(torch.tensor([[0.0], [1.0]]))
    pipe.close()


def test_nondeterministic_stage_is_refused_when_recomputed():
    calls = []

    def fn(x):
        calls.append(1)
        return (x,) * len(calls)

    pipe = make_pipe(
        nn.Sequential(nn.Linear(5, 5).double(), Functional(fn)), 2, 1, "always"
    )
    out = pipe(X)
    with pytest.raises(RuntimeError, match="expected 1 output tensors as in its forw"):
        out[0].sum().backward()
    pipe.close()


def test_foreign_parameter_is_refused():
    weight = torch.ones(5, dtype=torch.double, requires_grad=True)
    pipe = make_pipe(
        nn.Sequential(nn.Identity(), Functional(lambda x: x * weight)), 2, 2
    )
    with pytest.raises(RuntimeError, match="got one from elsewhere"):
        pipe(X)
    pipe.close()
