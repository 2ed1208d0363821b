"""``pipetransformer doctor --run``: a minute of training, to see that all of it works.

Two processes train a small model: layers freeze, the pipeline shrinks and a replica
appears, the cache serves frozen activations, one process is killed and the other goes
on. Run as a module this file is what the processes do.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipetransformer.cli.checks import MISSING, OK, Finding

_RANKS = 2
_DEADLINE_S = 120.0
_SAMPLES, _BATCH, _EPOCHS = 96, 16, 5
_LAST_WORDS = 400  # characters of a process's output in a finding
_KILLED_IN = 3, 2  # epoch, batch


def findings() -> list[Finding]:
    """Train, and judge what came of it."""
    with tempfile.TemporaryDirectory(prefix="pipetransformer-") as name:
        folder = Path(name)
        ends = _train(folder)
        codes = [code for code, _ in ends]
        try:
            summary = json.loads((folder / "summary.json").read_text())
        except (OSError, ValueError):
            summary = None
        if codes[0] != 0 or summary is None:
            return [_failed("training", *ends[0])]
        return list(_judge(summary, codes, folder))


def _train(folder: Path) -> list[tuple[int | None, str]]:
    """Run the processes; return how each ended, see `_end_of`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(_RANKS),
        "LOCAL_WORLD_SIZE": str(_RANKS),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PIPETRANSFORMER_SECRET": secrets.token_hex(32),
        # Plans are to change shape, whatever the machine's cores.
        "PIPETRANSFORMER_SLOTS_AS_DEVICES": "1",
    }
    for name in ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        shared.pop(name, None)
    started = []
    for rank in range(_RANKS):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "pipetransformer.cli.self_test", str(folder)],
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return [_end_of(process) for process in started]


def _end_of(process: subprocess.Popen[bytes]) -> tuple[int | None, str]:
    """Return a process's exit code, None if it did not end, and its last words."""
    try:
        said, _ = process.communicate(timeout=_DEADLINE_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        code = None
    return code, said.decode(errors="replace").strip()[-_LAST_WORDS:]


def _failed(name: str, code: int | None, said: str) -> Finding:
    got = f"no end within {_DEADLINE_S:g} s" if code is None else f"exit code {code}"
    return Finding(name, MISSING, f"{got}: ...{said}", "see above")


def _judge(
    summary: Mapping[str, Any], codes: list[int | None], folder: Path
) -> Iterator[Finding]:
    epochs = summary["epochs"]
    losses = [epoch["train_loss"] for epoch in epochs]
    samples = [epoch["unique_samples"] for epoch in epochs]
    yield _finding(
        "training",
        len(epochs) == _EPOCHS and losses[-1] < losses[0],
        f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(epochs)} passes",
    )
    changes = [
        (c["from"], c["to"], c["pause_seconds"]) for c in summary["transformations"]
    ]
    shapes = [
        f"K={a['num_stages']} R={a['num_replicas']} to K={b['num_stages']} "
        f"R={b['num_replicas']} in {1000 * pause:.0f} ms"
        for a, b, pause in changes
        if a["num_stages"] > b["num_stages"]
    ]
    yield _finding("change of plan", bool(shapes), shapes[0] if shapes else "none")
    hits = epochs[2]["cache_hits"]
    yield _finding(
        "activation cache", hits == _SAMPLES, f"{hits} of {_SAMPLES} samples hit"
    )
    lost = [rank for record in summary["recoveries"] for rank in record["lost"]]
    killed = codes[1] == -signal.SIGKILL
    yield _finding(
        "loss of a process",
        killed and lost == [1] and samples == [_SAMPLES] * _EPOCHS,
        "rank 1 killed, rank 0 went on, every sample once"
        if lost == [1]
        else f"lost {lost}, exit codes {codes}, samples {samples}",
    )
    page = folder / "report.html"
    size = page.stat().st_size if page.exists() else 0
    yield _finding("report", size > 0, f"report.html, {size / 1000:.0f} KB")


def _finding(name: str, good: bool, value: str) -> Finding:
    advice = "" if good else "run the project's tests, and report what fails"
    return Finding(name, OK if good else MISSING, value, advice)


def train(folder: str) -> None:
    """Be one of the processes."""
    from datetime import timedelta

    import torch
    from torch import nn

    import pipetransformer as pt

    torch.manual_seed(0)
    width = 32
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 2))
    inputs = torch.randn(_SAMPLES, 8)
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    engine = pt.PipeTransformer(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([0, 5]),
        config=pt.Config(
            report=folder,
            cache=pt.CacheConfig(admission="always"),  # whatever it is worth here
            plan=pt.PlanConfig(
                # Two slots while all trains, one once layers are frozen: weights with
                # gradients and two moments, and activations.
                slot_memory_bytes=3 * parameter_bytes,
                reshape="always",
                replicas="all",  # both processes, however small the model
            ),
            autodp=pt.AutoDPConfig(
                on_peer_failure="continue",
                interface="lo",
                heartbeat_timeout=timedelta(seconds=6),
            ),
        ),
    )
    with engine:
        for epoch in engine.epochs(_EPOCHS):
            for number, batch in enumerate(engine.batches(data, _BATCH)):
                if engine.rank == 1 and (epoch, number) == _KILLED_IN:
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.step(batch)


if __name__ == "__main__":
    train(sys.argv[1])
