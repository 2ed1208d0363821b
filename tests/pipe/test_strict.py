"""The strict switch restores what the old pipeline did, at construction and calls."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from pipetransformer.pipe import NoChunk, Pipe, WithDevice, strict

from .models import Functional, make_pipe
from .test_construction import OwnForward, hooked, layout

X = torch.ones(4, 5)


@pytest.fixture
def strict_pipes(monkeypatch):
    """Strict pipes in a process that has an RPC agent, as far as the check knows."""
    monkeypatch.setattr("torch.distributed.rpc.api._is_current_rpc_agent_set", agent)
    assert not strict.is_strict()
    strict.set_strict(True)
    yield
    strict.set_strict(False)


def agent():
    return True


def test_strict_construction_without_rpc_is_refused_first(strict_pipes, monkeypatch):
    monkeypatch.setattr(
        "torch.distributed.rpc.api._is_current_rpc_agent_set", lambda: False
    )
    with pytest.raises(RuntimeError, match="Please initialize RPC framework"):
        Pipe(None, 0, "sometimes")
    strict.set_strict(False)
    Pipe(nn.Sequential(nn.ReLU()))


def test_torch_without_rpc_counts_as_not_initialised(strict_pipes, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc.api", None)
    with pytest.raises(RuntimeError, match="Please initialize RPC framework"):
        Pipe(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize("value, fails", [("1", True), ("0", False), (None, False)])
def test_environment_switches_once_at_import(value, fails, monkeypatch):
    code = """
import os
from torch import nn
from pipetransformer.pipe import Pipe, strict
os.environ["PIPETRANSFORMER_STRICT_COMPAT"] = "1"
print("strict", strict.is_strict())
try:
    Pipe(nn.Sequential(nn.ReLU()))
except RuntimeError as error:
    print("refused", error)
"""
    monkeypatch.delenv("PIPETRANSFORMER_STRICT_COMPAT", raising=False)
    if value is not None:
        monkeypatch.setenv("PIPETRANSFORMER_STRICT_COMPAT", value)
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=100, capture_output=True
    ).stdout.decode()
    assert f"strict {fails}" in out
    assert ("refused Please initialize RPC framework" in out) == fails


@pytest.mark.skipif(
    not torch.distributed.rpc.is_available(), reason="torch was built without RPC"
)
def test_strict_works_with_a_real_agent(tmp_path):
    code = """
import os, sys
import torch.distributed.rpc as rpc
from torch import nn
from pipetransformer.pipe import Pipe, strict
strict.set_strict(True)
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + sys.argv[1])
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
Pipe(nn.Sequential(nn.ReLU()))
rpc.shutdown()
try:
    Pipe(nn.Sequential(nn.ReLU()))
except RuntimeError:
    print("refused")
"""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "store")],
        check=True,
        timeout=100,
        capture_output=True,
    ).stdout.decode()
    assert "refused" in out


def test_pipes_keep_the_switch_that_they_were_built_under(strict_pipes):
    old = Pipe(nn.Sequential(Functional(lambda x, k=None: x)))
    strict.set_strict(False)
    new = Pipe(nn.Sequential(Functional(lambda x, k=None: x)))
    with pytest.raises(TypeError, match="expected none"):
        old(X, k=1)
    new(X, k=1)


def test_plans_are_never_strict(strict_pipes):
    layers = nn.Sequential(
        Functional(lambda x, k: [x, k]), Functional(lambda x, k: x + k)
    )
    pipe = make_pipe(layers, 1, 1)
    assert torch.equal(pipe(X, k=X), 2 * X)


def test_strict_child_without_parameters_is_a_cpu_stage(strict_pipes):
    layers = nn.Sequential(
        nn.Linear(5, 5, device="meta"), nn.ReLU(), WithDevice(nn.Tanh(), "meta")
    )
    assert layout(Pipe(layers)) == [
        ("meta", "Linear"),
        ("cpu", "ReLU"),
        ("meta", "Tanh"),
    ]


@pytest.mark.parametrize(
    "inner", [OwnForward(nn.Linear(5, 5), nn.Tanh()), hooked()], ids=["forward", "hook"]
)
def test_strict_inner_sequential_is_always_flattened(strict_pipes, inner):
    assert layout(Pipe(nn.Sequential(inner))) == [("cpu", "Linear", "Tanh")]


@pytest.mark.parametrize("switch", [True, False])
def test_strict_list_inside_a_stage_is_one_value(strict_pipes, switch):
    strict.set_strict(switch)
    seen = []
    layers = nn.Sequential(
        Functional(lambda x: [x, x]),
        Functional(lambda *a: seen.append(a) or (X, X)),
        Functional(lambda *a: seen.append(a) or a[0]),
    )
    Pipe(nn.Sequential(layers))(X)
    assert len(seen[0]) == (1 if switch else 2)
    assert len(seen[1]) == 2  # a tuple is spread in any case


def test_strict_keywords_are_refused(strict_pipes):
    pipe = Pipe(nn.Sequential(nn.Linear(5, 5)))
    text = r"keyword arguments: expected none \(strict compatibility\), got \['input'\]"
    with pytest.raises(TypeError, match=text):
        pipe(input=X)


@pytest.mark.parametrize("switch", [True, False])
def test_strict_tensors_in_containers_are_not_checked(strict_pipes, switch):
    strict.set_strict(switch)
    pipe = Pipe(nn.Sequential(Functional(lambda x, other: x)))
    other = [X.to("meta")]
    if switch:
        assert torch.equal(pipe(X, other).local_value(), X)
    else:
        with pytest.raises(ValueError, match="All inputs should be on the same device"):
            pipe(X, other)
    with pytest.raises(ValueError, match="All inputs should be on the same device"):
        pipe(X, other[0])


def test_strict_no_chunk_in_a_container_stays_what_it_is(strict_pipes):
    seen = []
    layer = Functional(lambda x, whole, box: seen.append((type(whole), type(box[0]))))
    layers = nn.Sequential(Functional(lambda *a: layer(*a) or a[0]))
    for chunks in (1, 2):
        Pipe(layers, chunks)(X, NoChunk(X), [NoChunk(X)])
    assert set(seen) == {(torch.Tensor, NoChunk)} and len(seen) == 3
