"""``pipetransformer cluster``: what it measures, assumes, prints and writes."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from pipetransformer import planner
from pipetransformer.cli import cluster as commands
from pipetransformer.cli.cluster import _line
from pipetransformer.cli.main import main
from pipetransformer.planner import Cluster, SearchOptions, search
from tests.planner.instances import equal_profile

TIMEOUT_S = 120


def run_here(capsys, *arguments):
    """Return the exit code, and what the command prints."""
    code = main(["cluster", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def run_ranks(*arguments, world=2, local_world=2):
    """Run the command in processes as torchrun starts them; return rank 0's JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank in range(world):
        environ = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local_world),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(local_world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        line = [sys.executable, "-m", "pipetransformer", "cluster", *arguments]
        running.append(
            subprocess.Popen(
                line,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    printed = []
    for process in running:
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, err
        printed.append(out)
    assert printed[1:] == [""] * (world - 1), "the first process alone prints"
    return Cluster.from_json(printed[0])


def test_tiers_are_measured_and_the_file_can_be_planned_with(tmp_path, capsys):
    path = tmp_path / "cluster.json"
    options = ["--slots", 3, "--tiers", "--record-bytes", 20_000, "--disk", tmp_path]
    code, out, _ = run_here(capsys, *options, "--output", path)
    assert code == 0 and f"written to {path}" in out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    cluster = Cluster.from_json(path.read_text())
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, 3)
    tiers = cluster.cache
    assert min(tiers.host_bytes, tiers.disk_bytes) > 10**6
    assert min(tiers.host_bytes_per_s, tiers.disk_bytes_per_s) > 10**6
    assert tiers.host_in_line and tiers.host_record_ns > 0
    rows = [line.removeprefix("cache ") for line in out.splitlines()]
    lines = {row.split()[0]: row for row in rows}
    for name in ("host_bytes_per_s", "host_record_ns", "disk_bytes_per_s"):
        assert lines[name].split()[-1] == "measured"
    assert "measured" not in lines["host_bytes"] + lines["disk_bytes"]
    assert "assumed" in lines["step_ns"] and "free" in lines["network_bytes_per_s"]
    options = SearchOptions(
        global_batch=8, num_samples=100, cache_tiers=("disk", "host")
    )
    plan = search(equal_profile(4), cluster, options, boundary=2)
    assert plan.cache in ("host", "disk")


def test_without_anything_measured_all_is_assumed(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    code, out, _ = run_here(capsys, "--slots", 64, "--json")
    cluster = Cluster.from_json(out)
    assert code == 0 and cluster.cache is None
    assert cluster.replica_link_bytes_per_s == planner.HOST_LINK_BYTES_PER_S
    assert cluster.cores_permille >= 1000, "64 slots share this machine's cores"
    assert json.loads(out)["version"] == 1


def test_processes_of_a_node_measure_their_link():
    cluster = run_ranks("--links", "--json")
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, 2)
    assert cluster.replica_link_bytes_per_s != planner.HOST_LINK_BYTES_PER_S
    assert cluster.replica_link_bytes_per_s > 10**6
    assert 0 < cluster.replica_link_latency_ns < 10**9
    assert cluster.network_bytes_per_s is None


def test_nodes_measure_the_network():
    cluster = run_ranks("--links", "--slots", "4", "--json", world=2, local_world=1)
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 4)
    assert cluster.network_bytes_per_s > 10**6 and cluster.network_latency_ns > 0
    assert cluster.replica_link_bytes_per_s == planner.HOST_LINK_BYTES_PER_S


def test_the_latency_of_a_network_is_that_of_one_message(monkeypatch):
    # Two ranks reduce in two messages that follow each other.
    measured = {"ranks": [], "told": (9000, 10**9)}

    def all_reduce(place, ranks, *, device):
        measured["ranks"].append((ranks, device))
        return measured["told"]

    monkeypatch.setattr(commands, "_all_reduce", all_reduce)
    monkeypatch.setattr(commands, "_connected", contextlib.nullcontext)
    found = commands._links(commands._Place(0, 4, 2), 0)
    assert measured["ranks"] == [((0, 1), None), ((0, 2), None)]
    assert found["network_latency_ns"] == found["replica_link_latency_ns"] == 4500
    assert found["network_bytes_per_s"] == found["replica_link_bytes_per_s"] == 10**9


def test_a_process_that_reaches_no_other_is_an_error_line(capsys, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(commands, "_TIMEOUT", timedelta(seconds=1))
    code, out, err = run_here(capsys, "--links", "--json")
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: --links: expected processes and devices that reach")
    assert "Traceback" not in err


def test_latency_and_rate_are_those_of_a_line():
    # A millisecond and a gigabyte per second.
    latency, rate = _line(0.001, 0.001 + ((16 << 20) - (1 << 10)) / 1e9)
    assert latency == 10**6 and rate == pytest.approx(10**9, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "environ", "problem"),
    [
        (["--links"], {}, "--links: expected two processes or devices, got one"),
        (["--slots", "0"], {}, "expected an integer from 1"),
        ([], {"RANK": "0"}, "expected what torchrun sets, got 'WORLD_SIZE'"),
        (
            [],
            {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"},
            "expected nodes of equally many",
        ),
        (["--disk", "/tmp"], {}, "--disk: expected --tiers, too, got it alone"),
        (["--tiers", "--disk", "/nowhere"], {}, "--disk: expected a folder on a work"),
    ],
)
def test_bad_input_is_refused(capsys, monkeypatch, options, environ, problem):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, _, err = run_here(capsys, *options)
    assert code == 2 and problem in err


def test_a_device_that_cannot_be_used_is_named(capsys, monkeypatch):
    def broken(index):
        raise RuntimeError("device is in a bad state\nmore")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    code, _, err = run_here(capsys, "--json")
    assert code == 2 and "got device is in a bad state; leave devices out" in err
    assert "Traceback" not in err and "more" not in err
