"""Fingerprints change with whatever changes values; hashes follow content."""

import array
import copy
import ctypes
import dataclasses
import datetime
import enum
import functools
import logging
import multiprocessing
import threading
import types
import uuid
import weakref
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipetransformer.autocache import (
    cacheable,
    fingerprint_chain,
    hash_rows,
    prefix_content,
)
from pipetransformer.skip import Namespace
from tests.pipe.skips import Pop, Stash
from tests.support.ranks import run_ranks


class Scaled(nn.Module):
    def __init__(self, scale=2.0, act=torch.relu):
        super().__init__()
        self.scale = scale
        self.act = act
        self.table = torch.ones(2)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.act(x * self.scale)


def make_layers():
    torch.manual_seed(3)
    return [
        nn.Linear(4, 4),
        nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1)),
        Scaled(),
        nn.Linear(4, 4),
    ]


def changed_from(change, count=4):
    """Index of the first element that differs after `change(layers)`."""
    layers = make_layers()
    before = fingerprint_chain(layers, count)
    change(layers)
    after = fingerprint_chain(layers, count)
    same = [a == b for a, b in zip(before, after, strict=True)]
    first = same.index(False) if False in same else None
    assert first is None or not any(same[first:])
    return first


def set_item(layers, index, layer):
    layers[index] = layer


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda m: None, None),
        (lambda m: m[1].train(not m[1].training), None),
        (lambda m: m[1].requires_grad_(False), None),
        (lambda m: m[0].weight.data.view(-1)[5].mul_(1.0001), 1),
        (lambda m: m[1][0].running_mean.add_(1e-3), 2),
        (lambda m: setattr(m[1][1], "p", 0.2), 2),
        (lambda m: setattr(m[2], "scale", 2.5), 3),
        (lambda m: setattr(m[2], "act", torch.tanh), 3),
        (lambda m: m[2].table.add_(1), 3),
        (lambda m: m[2].hidden.add_(1), 3),
        (lambda m: m[3].double(), 4),
        (lambda m: set_item(m, 3, nn.Linear(4, 4, bias=False)), 4),
        (lambda m: set_item(m, 2, nn.Identity()), 3),
    ],
)
def test_chain_changes_from_the_changed_layer_on(change, first):
    assert changed_from(change) == first


def test_chain_starts_with_the_context():
    layers = make_layers()
    plain = fingerprint_chain(layers, 4)
    other = fingerprint_chain(layers, 4, context="autocast bfloat16")
    assert len(plain) == 5
    assert all(a != b for a, b in zip(plain, other, strict=True))
    assert fingerprint_chain(layers, 2) == plain[:3]


def skip_layers(first, second):
    """Two stashes and two pops: the third layer's and the fourth layer's names."""
    names = Namespace(), Namespace()
    return [
        Stash().isolate(names[0]),
        Stash().isolate(names[1]),
        Pop().isolate(names[first]),
        Pop().isolate(names[second]),
    ]


def test_chain_tells_whose_skips_are_popped():
    chain = fingerprint_chain(skip_layers(0, 1), 4)
    assert fingerprint_chain(skip_layers(0, 1), 4) == chain, "names differ by process"
    other = fingerprint_chain(skip_layers(1, 0), 4)
    same = [a == b for a, b in zip(chain, other, strict=True)]
    assert same == [True, True, True, False, False]


def test_chain_of_a_copy_is_equal():
    layers = make_layers()
    assert fingerprint_chain(copy.deepcopy(layers), 4) == fingerprint_chain(layers, 4)


def chain_of_process(rank):
    return fingerprint_chain(make_layers(), 4)


@pytest.mark.distributed
def test_chain_is_the_same_in_every_process():
    first, second = run_ranks(chain_of_process, 2)
    assert first == second == fingerprint_chain(make_layers(), 4)


def test_cacheable_names_the_module_that_forbids_it():
    layers = [layer.eval() for layer in make_layers()]
    assert cacheable(layers) is None
    layers[1][1].train()
    assert cacheable(layers) == "layer 1 (Sequential.1: Dropout) is in train mode"
    layers[1] = nn.BatchNorm1d(4, track_running_stats=False).eval()
    assert cacheable(layers) == (
        "layer 1 (BatchNorm1d) normalises with the statistics of each batch"
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 3))
def test_row_hashes_are_equal_exactly_for_equal_rows(row_values, columns):
    values = torch.tensor(row_values, dtype=torch.int16)
    wide = values[:, None].expand(-1, columns).contiguous()
    hashes = hash_rows(wide, values).tolist()
    for i, a in enumerate(row_values):
        for j, b in enumerate(row_values):
            assert (hashes[i] == hashes[j]) == (a == b)


def test_row_hash_depends_on_dtype_shape_and_order_not_on_memory_or_batch():
    x = torch.randn(6, 3, 5)
    plain = hash_rows(x)
    assert plain.dtype == torch.int64 and plain.shape == (6,)
    assert torch.equal(hash_rows(x.transpose(1, 2).contiguous().transpose(1, 2)), plain)
    assert torch.equal(hash_rows(x[2:4]), plain[2:4])
    for other in (x.double(), x.view(6, 15), x.transpose(1, 2), x + 0.5):
        assert not torch.equal(hash_rows(other), plain)
    assert not torch.equal(hash_rows(x, plain), hash_rows(plain, x))


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Options:
    scale: float = 1.0
    inner: object = None


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Plain:
    def __init__(self, scale=1.0, **others):
        self.scale = scale
        self.__dict__.update(others)


class Bent:
    def __init__(self, scale):
        self.scale = scale

    def act(self, x):
        return x * self.scale

    def __call__(self, x):
        return x * self.scale


def scaled_by(scale):
    return lambda x: x * scale


def kind_of(scale):
    """Return a class that holds a number for all of its instances."""

    class Base:
        def act(self, x):
            return x * self.scale

    class Kind(Base):
        pass

    Base.scale = scale
    return Kind


def weight_of(value):
    """Return a layer whose weights hold a number."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(value)
        layer.bias.fill_(0.0)
    return layer


def with_default(x, scale=1.0):
    return x * scale


def shifted(x, scale=1.0):
    return x * scale


shifted.__qualname__ = with_default.__qualname__
shifted.__defaults__ = (2.0,)


def around(value):
    """Return an object that holds itself."""
    made = Plain(value)
    made.itself = [made]
    return made


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_double), ("second", ctypes.c_int))


# Makes a setting from a number.
SETTINGS = {
    "a namespace": lambda v: types.SimpleNamespace(scale=v),
    "a data class": Options,
    "a data class in another": lambda v: Options(inner=Options(v)),
    "a data class with slots": Slots,
    "an object": Plain,
    "an object in a list of an object": lambda v: Plain(others=[Plain(v)]),
    "an object that holds itself": around,
    "a fraction": Fraction,
    "a decimal": Decimal,
    "a time": lambda v: datetime.timedelta(seconds=v),
    "an array of the library": lambda v: array.array("d", [v]),
    "a value of processes": lambda v: multiprocessing.Value("d", v),
    "an array of processes": lambda v: multiprocessing.Array("d", [v]),
    "a value of ctypes": ctypes.c_double,
    "an array of arrays of ctypes": lambda v: ((ctypes.c_double * 1) * 2)((v,), (v,)),
    "an array of structures": lambda v: (Pair * 2)(Pair(v, 1), Pair(v, 2)),
    "an array": lambda v: np.full(3, v, dtype=np.float32),
    "an array's scalar": np.float32,
    "an array of objects": lambda v: np.array([v, "a"], dtype=object),
    "an array in a dict": lambda v: {"scales": np.full((2, 2), v)},
    "a tensor in a list": lambda v: [torch.full((2,), v)],
    "a set": lambda v: {"a", "b", v},
    "a range": lambda v: range(int(v)),
    "an enum": lambda v: [Level.LOW, Level(int(v))],
    "a partial": lambda v: functools.partial(torch.clamp, max=v),
    "a function of a closure": scaled_by,
    "a bound method": lambda v: Bent(v).act,
    "an object that is called": Bent,
    "a lambda's code": lambda v: (lambda x: x + 1) if v == 1.0 else (lambda x: x - 1),
    "a lambda's constant": lambda v: (lambda x: x + 1) if v == 1.0 else lambda x: x + 2,
    "a class": kind_of,
    "an instance of a class": lambda v: kind_of(v)(),
    "a layer of others in a list": lambda v: [weight_of(v)],
    "a function of a layer": lambda v: functools.partial(weight_of(v).forward),
    "a function's default": lambda v: with_default if v == 1.0 else shifted,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_chain_changes_with_what_a_setting_holds(setting):
    make, layer = SETTINGS[setting], nn.Identity()

    def chain(value):
        layer.setting = make(value)
        return fingerprint_chain([layer], 1)[1]

    assert chain(1.0) == chain(1.0), "equal settings look different"
    assert chain(1.0) != chain(2.0)


def test_chain_stays_whenever_a_layer_was_made_and_what_a_distribution_has_drawn():
    layer, tanh = nn.Identity(), torch.distributions.transforms.TanhTransform
    normal = torch.distributions.Normal(0.0, 1.0)
    layer.setting = torch.distributions.TransformedDistribution(normal, [tanh(1)])
    chains = set()
    for _ in range(2):
        layer.made, layer.number = datetime.datetime.now(), uuid.uuid4()
        layer.setting.log_prob(layer.setting.sample())
        chains.add(fingerprint_chain([layer], 1)[1])
    assert len(chains) == 1


def test_chain_changes_with_what_the_class_of_a_layer_holds():
    class Layer(nn.Identity):
        scale = 1.0

    layer = nn.Sequential(Layer())
    chains = [fingerprint_chain([layer], 1)[1]]
    Layer.scale = 2.0
    chains.append(fingerprint_chain([layer], 1)[1])
    Layer.scale = 1.0
    chains.append(fingerprint_chain([layer], 1)[1])
    assert chains[0] == chains[2] != chains[1]


def test_caches_and_registries_of_a_class_do_not_change_the_chain():
    class Layer(nn.Identity):
        registry = {}
        seen = []

    first = fingerprint_chain([Layer()], 1)
    Layer.registry["other"] = Layer
    Layer.seen.append(3)
    assert fingerprint_chain([Layer()], 1) == first


def test_tables_that_filled_in_another_order_are_equal():
    layer, other = nn.Identity(), nn.Identity()
    layer.table, other.table = {8: 1.0, 16: 2.0}, {16: 2.0, 8: 1.0}
    assert fingerprint_chain([layer], 1) == fingerprint_chain([other], 1)


def test_a_layer_of_others_is_seen_by_each_layer_that_does_not_belong_to_it():
    layers, other = [nn.Identity(), nn.Identity()], weight_of(1.0)
    held = [nn.ModuleList([layers[0], other])]
    for layer in layers:
        layer.held = held
    before = fingerprint_chain(layers, 2)
    with torch.no_grad():
        other.weight.add_(1.0)
    after = fingerprint_chain(layers, 2)
    assert before[1] == after[1], "what holds the layer may be the model"
    assert before[2] != after[2]


def test_content_names_what_has_changed():
    layers = make_layers()
    before = prefix_content(layers)
    layers[2].scale = 3.0
    with torch.no_grad():
        layers[0].bias.add_(1.0)
        layers[1][0].running_mean.add_(1.0)
    now = prefix_content(layers)
    assert {name for name in now if now[name] != before[name]} == {
        "layer 0.bias",
        "layer 1.0.running_mean",
        "layer 2.scale",
    }


def test_chain_changes_when_a_setting_is_changed_in_place():
    layer = nn.Identity()
    layer.config, layer.scales = types.SimpleNamespace(scale=1.0), np.ones(1)
    chains = [fingerprint_chain([layer], 1)[1]]
    layer.config.scale = 2.0
    chains.append(fingerprint_chain([layer], 1)[1])
    layer.scales[0] = 2.0
    chains.append(fingerprint_chain([layer], 1)[1])
    assert len(set(chains)) == 3


def untold():
    """Return settings of which some differ in each process, and change as it runs."""
    layer = nn.Identity()
    handle = layer.register_forward_hook(lambda *_: None)
    deep = Plain()
    for _ in range(100):
        deep = Plain(inner=deep)
    return {
        "handle": handle,
        "logger": logging.getLogger("pipetransformer"),
        "lock": threading.Lock(),
        "object": object(),
        "generator": torch.Generator(),
        "weak": weakref.ref(layer),
        "deep": deep,
        "names": {"a", "b", "c", "d"},
        "meta": [torch.ones(2, device="meta")],
    }


def chain_with_untold(rank):
    layer = nn.Identity()
    for _ in range(rank):
        layer.register_forward_hook(lambda *_: None)  # handles are numbered
    layer.settings = Plain(**untold())
    for name, value in untold().items():
        setattr(layer, f"own_{name}", value)
    layer.model = [nn.Sequential(layer, nn.Linear(2, 2))]  # its weights train
    first = fingerprint_chain([layer], 1)
    logging.getLogger("pipetransformer").isEnabledFor(rank)
    assert fingerprint_chain([layer], 1) == first
    return first


@pytest.mark.distributed
def test_what_cannot_be_told_does_not_change_the_chain_from_run_to_run():
    first, second = run_ranks(chain_with_untold, 2)
    assert first == second == chain_with_untold(0)


class Graph(nn.Module):
    """Holds a sparse operator, as a buffer or as an attribute."""

    def __init__(self, matrix, *, buffer):
        super().__init__()
        if buffer:
            self.register_buffer("operator", matrix)
        else:
            self.operator = matrix
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner((self.operator @ x.T).T)


LAYOUTS = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((1, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("buffer", [True, False])
def test_sparse_tensors_are_told_apart_by_what_they_hold(layout, buffer):
    def found(matrix):
        torch.manual_seed(0)
        layer = Graph(LAYOUTS[layout](matrix), buffer=buffer)
        assert cacheable([layer.eval()]) is None
        return fingerprint_chain([layer], 1)[1]

    matrix = torch.eye(3)
    other, elsewhere = matrix.clone(), matrix.clone()
    other[1, 1] = 2.0
    elsewhere[1, 1], elsewhere[1, 2] = 0.0, 1.0
    assert found(matrix) == found(matrix.clone())
    assert len({found(each) for each in (matrix, other, elsewhere)}) == 3


def test_wrapped_tensors_are_told_apart_by_what_they_wrap():
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")

    def found(first, second):
        layer = nn.Linear(2, 2, bias=False)
        pair = two_tensor.TwoTensor(
            torch.full((2, 2), first), torch.full((2, 2), second)
        )
        layer.weight = nn.Parameter(pair, requires_grad=False)
        assert cacheable([layer.eval()]) is None
        return fingerprint_chain([layer], 1)[1]

    assert found(1.0, 2.0) == found(1.0, 2.0)
    assert len({found(1.0, 2.0), found(2.0, 1.0), found(1.0, 3.0)}) == 3


def test_tensors_with_nothing_to_read_are_a_reason_and_no_error():
    layer = nn.Linear(2, 2, device="meta").eval()
    assert "holds weight, a Parameter of layout torch.strided" in cacheable([layer])
    assert fingerprint_chain([layer], 1)[1] == fingerprint_chain([layer], 1)[1]
