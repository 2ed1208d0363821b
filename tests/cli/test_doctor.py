"""The doctor: every status from faked facts, and its report of this machine."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from pipetransformer import _extension
from pipetransformer._extension import host_memory
from pipetransformer.autodp import secret
from pipetransformer.cli import checks, doctor, main
from pipetransformer.cli.machine import (
    Facts,
    read_facts,
)
from pipetransformer.cli.network import SECRET_VARIABLES, Network, look_up_network
from pipetransformer.network import Interface

GIB = 2**30
ONLY_LOOPBACK = {"lo": Interface("lo", ("127.0.0.1",))}
NETWORK = Network(
    wanted="",
    hostname="node0",
    host_address="10.0.0.5",
    interfaces={
        "lo": Interface("lo", ("127.0.0.1", "::1")),
        "eth0": Interface("eth0", ("10.0.0.5",)),
        "ib0": Interface("ib0", ("10.1.0.5",), infiniband=True),
    },
    master="",
    route_address="",
)
FACTS = Facts(
    python=(3, 11, 7),
    torch="2.13.0+cu130",
    torch_error="",
    extension_error="",
    built_for="2.13.0+cu130",
    kernels=True,
    nvcc="",
    gloo=True,
    nccl=True,
    cuda_devices=(("A card", 80 * GIB),),
    cuda_error="",
    direct_pairs=0,
    cores=16,
    usable_cores=16,
    network=NETWORK,
    shared_memory=(8 * GIB, 8 * GIB),
    locked_memory=None,
    memory=64 * GIB,
    memory_limit=64 * GIB,
    memory_limited_by="",
    io_uring="",
    extras={"cli": (), "examples": ()},
)


def finding(name, **changes):
    """The finding of that name for a machine that differs from a sound one."""
    links = {key: changes.pop(key) for key in list(changes) if hasattr(NETWORK, key)}
    facts = dataclasses.replace(
        FACTS, network=dataclasses.replace(NETWORK, **links), **changes
    )
    (found,) = [f for f in checks.findings(facts) if f.name == name]
    return found


def test_a_sound_machine_has_nothing_to_do():
    found = checks.findings(FACTS)
    assert [(f.name, f.status, f.advice) for f in found if f.status != "ok"] == []
    assert len({f.name for f in found}) == len(found) == 16
    assert all(f.value for f in found)


@pytest.mark.parametrize(
    ("name", "status", "value", "advice", "changes"),
    [
        ("python", "missing", "3.9.1", "3.10 or newer", {"python": (3, 9, 1)}),
        (
            "torch",
            "missing",
            "cannot be imported: No module named 'torch'",
            "install torch 2.11",
            {"torch": "", "torch_error": "No module named 'torch'"},
        ),
        ("torch", "missing", "2.10.1", "install torch 2.11", {"torch": "2.10.1"}),
        ("torch", "note", "2.14.0a0+git1", "newer than", {"torch": "2.14.0a0+git1"}),
        (
            "extension",
            "missing",
            "not built: pipetransformer._C: expected a built extension, got none",
            "rebuild it: pip install",
            {
                "built_for": "",
                "extension_error": "pipetransformer._C: expected a built extension, "
                "got none; rebuild it: pip install",
            },
        ),
        (
            "extension",
            "missing",
            "built for torch 2.13.0+cu130: it needs torch",
            "see the lines above",
            {"extension_error": "it needs torch"},
        ),
        ("CUDA kernels", "note", "slower", "put nvcc on PATH", {"kernels": False}),
        (
            "CUDA kernels",
            "note",
            "slower",
            "build the extension again",
            {"kernels": False, "nvcc": "/cuda/bin/nvcc"},
        ),
        (
            "CUDA kernels",
            "ok",
            "no CUDA device needs them",
            "",
            {"kernels": False, "cuda_devices": ()},
        ),
        ("CUDA devices", "ok", "0 A card 80.0 GiB", "", {}),
        ("CUDA devices", "ok", "CPU slots", "", {"cuda_devices": ()}),
        (
            "CPU",
            "note",
            "16 cores, 1.5 of them usable",
            "threads_per_stage",
            {"usable_cores": 1.5},
        ),
        ("process groups", "missing", "no gloo", "install", {"gloo": False}),
        ("process groups", "note", "no nccl", "with nccl", {"nccl": False}),
        (
            "network interface",
            "ok",
            "TCP over eth0 10.0.0.5 (address of the hostname)",
            "",
            {},
        ),
        (
            "network interface",
            "note",
            "loopback lo 127.0.1.1 (address of the hostname)",
            "AutoDPConfig.interface to one of eth0, ib0",
            {"host_address": "127.0.1.1"},
        ),
        (
            "network interface",
            "ok",
            "TCP over InfiniBand ib0 10.1.0.5 (way to the store)",
            "",
            {"host_address": "", "master": "10.1.0.1", "route_address": "10.1.0.5"},
        ),
        (
            "network interface",
            "ok",
            "loopback lo 127.0.0.1 (no other way is known); there is no other",
            "",
            {"host_address": "", "interfaces": ONLY_LOOPBACK},
        ),
        (
            "network interface",
            "ok",
            "TCP over InfiniBand ib0 10.1.0.5 (GLOO_SOCKET_IFNAME names it)",
            "",
            {"wanted": "ib0"},
        ),
        (
            "network interface",
            "missing",
            "GLOO_SOCKET_IFNAME: expected one of eth0, ib0, lo, got 'ib7'",
            "set GLOO_SOCKET_IFNAME or AutoDPConfig.interface",
            {"wanted": "ib7"},
        ),
        (
            "nccl transports",
            "ok",
            "no InfiniBand, no direct access between devices",
            "",
            {},
        ),
        (
            "nccl transports",
            "ok",
            "direct (NVLink or PCIe) 2 of 2 pairs; InfiniBand mlx5_0; TCP",
            "",
            {
                "cuda_devices": (("A card", GIB), ("A card", GIB)),
                "direct_pairs": 2,
                "infiniband": ("mlx5_0",),
            },
        ),
        ("way to the store", "ok", "MASTER_ADDR is not set", "", {}),
        (
            "way to the store",
            "note",
            "TCP over InfiniBand ib0 10.1.0.5 to MASTER_ADDR 10.1.0.1; no secret",
            "who reaches its port controls the run: set PIPETRANSFORMER_SECRET",
            {"master": "10.1.0.1", "route_address": "10.1.0.5"},
        ),
        (
            "way to the store",
            "ok",
            "TCP over InfiniBand ib0 10.1.0.5 to MASTER_ADDR 10.1.0.1; runs have a",
            "",
            {"master": "10.1.0.1", "route_address": "10.1.0.5", "sealed": True},
        ),
        (
            "way to the store",
            "ok",
            "loopback lo 127.0.0.1 to MASTER_ADDR localhost",
            "",
            {"master": "localhost", "route_address": "127.0.0.1"},
        ),
        (
            "way to the store",
            "missing",
            "none to MASTER_ADDR nowhere",
            "set MASTER_ADDR",
            {"master": "nowhere"},
        ),
        (
            "memory",
            "ok",
            "64.0 GiB, this job may use 2.0 GiB (limit of /sys/fs/cgroup/job)",
            "",
            {"memory_limit": 2 * GIB, "memory_limited_by": "/sys/fs/cgroup/job"},
        ),
        (
            "memory",
            "note",
            "not read",
            "mend the extension",
            {"memory": None, "memory_limit": None},
        ),
        ("shared memory", "note", "no /dev/shm", "mount", {"shared_memory": None}),
        (
            "shared memory",
            "note",
            "/dev/shm 64 MiB, 60 MiB free",
            "--shm-size",
            {"shared_memory": (2**26, 60 * 2**20)},
        ),
        (
            "locked memory",
            "note",
            "at most 8 MiB",
            "ulimit -l unlimited",
            {"locked_memory": 2**23},
        ),
        (
            "locked memory",
            "ok",
            "nothing here locks memory",
            "",
            {"locked_memory": 2**23, "cuda_devices": ()},
        ),
        ("io_uring", "ok", "available", "", {}),
        ("io_uring", "ok", "not available: forbidden", "", {"io_uring": "forbidden"}),
        (
            "extra cli",
            "note",
            "missing: rich",
            "pip install --no-build-isolation '.[cli]'",
            {"extras": {"cli": ("rich",)}},
        ),
    ],
)
def test_each_fact_has_its_finding(name, status, value, advice, changes):
    found = finding(name, **changes)
    assert found.status == status
    assert value in found.value
    assert advice in found.advice and bool(found.advice) == bool(advice)


def test_without_torch_nothing_is_said_of_its_parts():
    facts = dataclasses.replace(FACTS, torch="", torch_error="none", gloo=False)
    assert "process groups" not in [f.name for f in checks.findings(facts)]


def report(monkeypatch, capsys, facts, *arguments):
    monkeypatch.setattr(doctor, "read_facts", lambda environ: facts)
    code = main.main(["doctor", *arguments])
    return code, capsys.readouterr().out


def test_json_report_and_exit_codes(monkeypatch, capsys):
    code, out = report(monkeypatch, capsys, FACTS, "--json")
    assert code == 0 and json.loads(out)["missing"] == []
    sick = dataclasses.replace(FACTS, extension_error="broken; rebuild it")
    code, out = report(monkeypatch, capsys, sick, "--json")
    read = json.loads(out)
    assert code == 1 and read["version"] == 1 and read["missing"] == ["extension"]
    assert {
        "name": "extension",
        "status": "missing",
        "value": "built for torch 2.13.0+cu130: broken",
        "advice": "rebuild it",
    } in read["findings"]


def test_text_report_shows_every_line_and_what_to_do(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    code, out = report(monkeypatch, capsys, FACTS)
    assert code == 0 and out.splitlines()[-1] == "nothing missing"
    for found in checks.findings(FACTS):
        assert found.name in out and found.value in out
    sick = dataclasses.replace(FACTS, gloo=False)
    code, out = report(monkeypatch, capsys, sick)
    assert code == 1 and out.splitlines()[-1] == "missing: process groups"
    assert "-> install a torch with torch.distributed and gloo" in out


def test_this_machine_can_be_looked_at():
    facts = read_facts(os.environ)
    assert facts.extension_error == "" and facts.built_for == facts.torch
    assert facts.python == sys.version_info[:3]
    assert 0 < facts.usable_cores <= facts.cores
    memory = host_memory()
    assert (facts.memory, facts.memory_limit, facts.memory_limited_by) == (
        memory.total_bytes,
        memory.limit_bytes,
        memory.limited_by,
    )
    assert facts.memory > 2**28
    assert all(i.addresses for i in facts.network.interfaces.values())


@pytest.mark.parametrize(
    ("allowed", "usable"), [(1.5, 1.5), (8.0, 3), (float("inf"), 3)]
)
def test_the_jobs_cgroups_and_its_affinity_limit_the_cores(
    allowed, usable, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(_extension, "host_cores", lambda: allowed)
    assert read_facts({}).usable_cores == usable


def test_a_missing_extension_is_a_finding_and_no_traceback():
    script = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pipetransformer._build_info':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from pipetransformer.cli.main import main\n"
        "sys.exit(main(['doctor', '--json']))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150
    )
    assert result.returncode == 1 and result.stderr == ""
    assert "extension" in json.loads(result.stdout)["missing"]


def test_network_is_asked_for_the_way_to_the_store(tmp_path):
    found = look_up_network({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
    assert found.master == "127.0.0.1" and found.route_address == "127.0.0.1"
    assert found.wanted == "lo"
    assert not found.sealed
    state = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")
    found = look_up_network({}, tmp_path)
    assert found.route_address == "" and found.infiniband == ("mlx5_0",)
    assert (secret.SECRET_VARIABLE, secret.SECRET_FILE_VARIABLE) == SECRET_VARIABLES
    assert all(look_up_network({name: "x"}).sealed for name in SECRET_VARIABLES)


def test_a_device_that_is_broken_is_a_finding_and_no_traceback(monkeypatch, capsys):
    def broken(_):
        raise RuntimeError("CUDA error: uncorrectable ECC error\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    facts = read_facts({})
    assert facts.cuda_error == "CUDA error: uncorrectable ECC error"
    (found,) = [f for f in checks.findings(facts) if f.name == "CUDA devices"]
    assert found.status == "missing" and found.value.endswith("ECC error")
    assert main.main(["doctor"]) == 1
    assert "missing: CUDA devices" in capsys.readouterr().out
