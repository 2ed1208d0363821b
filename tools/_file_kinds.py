"""The kinds of files that the product reads: whole ones, and how reading may end."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import tempfile
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from _damage import (
    TOKEN,
    damaged_archive,
    damaged_bytes,
    damaged_json,
    damaged_tree,
    tensor_file,
)
from torch import nn

from pipetransformer import checkpoint
from pipetransformer.cli import main, output
from pipetransformer.planner import (
    Cluster,
    LayerProfile,
    Plan,
    Profile,
    Transition,
    replan,
    search,
)
from pipetransformer.report import (
    AbortRecord,
    EpochRecord,
    History,
    PlanShape,
    RecoveryRecord,
    RefusalRecord,
    TransformationRecord,
)
from pipetransformer.state import TrainingState

MOST_LETTERS = 20_000_000  # of output; an input has 300,000 at most
_DOCUMENTED = re.compile(r"error: .+: expected .+, got .+\n")


class Fault(Exception):
    """Reading ended in something that nobody was promised."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: Of the kind, and of its files.
        damaged: Makes a damaged file.
        read: Reads one as the product does; returns whether it was taken, and raises
            `Fault`, or whatever else nobody was promised.
    """

    name: str
    damaged: Callable[[random.Random], bytes]
    read: Callable[[Path], bool]


def kinds(folder: Path) -> dict[str, Kind]:
    """Return all kinds by name.

    Args:
        folder: For the whole files that a command reads beside the damaged one.
    """
    profile, cluster = _profile(), _cluster()
    plan = _plan(profile, cluster)
    texts = {
        "profile.json": profile.to_json(),
        "cluster.json": cluster.to_json(),
        "plan.json": plan.to_json(),
        "summary.json": json.dumps(_history(plan.transition).to_json()),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    scalars = [
        token
        for text in texts.values()
        for token in TOKEN.findall(text)
        if token not in "[]{},:"
    ]

    def damaged(name: str) -> Callable[[random.Random], bytes]:
        text = texts[name]
        if name == "plan.json":  # what is damaged is found by its own rule, not by this
            text = re.sub(r'"plan_hash":\d+,', "", text)
        return lambda rng: damaged_json(rng, text, scalars)

    given = ["--profile", str(folder / "profile.json")]
    given += ["--cluster", str(folder / "cluster.json")]
    batch = ["--global-batch", "16"]

    def read_plan(path: Path) -> bool:
        taken = run_command(["explain", str(path)])
        if taken:  # of another model, mostly: then that is said
            run_command(["explain", str(path), *given])
            run_command(["simulate", "--plan", str(path), *given])
        return taken

    found = [
        Kind(
            "profile.json",
            damaged("profile.json"),
            lambda path: run_command(
                ["plan", "--profile", str(path), *given[2:], *batch]
            ),
        ),
        Kind(
            "cluster.json",
            damaged("cluster.json"),
            lambda path: run_command(
                ["plan", *given[:2], "--cluster", str(path), *batch]
            ),
        ),
        Kind("plan.json", damaged("plan.json"), read_plan),
        Kind(
            "summary.json",
            damaged("summary.json"),
            lambda path: run_command(["explain", str(path)]),
        ),
        _checkpoint(),
    ]
    return {kind.name: kind for kind in found}


def run_command(arguments: list[str]) -> bool:
    """Run a command; return whether it took its files.

    Raises:
        Fault: control characters or too much on the console, or an error that is no
            line of the documented form.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.main(arguments)
    shown = out.getvalue() + err.getvalue()
    if len(shown) > MOST_LETTERS:
        raise Fault(f"output: expected {MOST_LETTERS} letters at most")
    raw = {letter for letter in set(shown) if unicodedata.category(letter) == "Cc"}
    if raw - {"\n"}:
        raise Fault(f"output: expected no control characters, got {sorted(raw)}")
    if code not in (output.OK, output.NEGATIVE, output.BAD_INPUT):
        raise Fault(f"exit code: expected 0, 1 or 2, got {code}")
    if code == output.BAD_INPUT and not _DOCUMENTED.fullmatch(err.getvalue()):
        raise Fault(f"error: expected the documented line, got {err.getvalue()!r}")
    return code != output.BAD_INPUT


def _profile() -> Profile:
    layers = tuple(
        LayerProfile(
            name=f"{index}.Linear",
            forward_ns=(1000, 3000),
            input_grad_ns=(1000, 3000),
            weight_grad_ns=(1000, 3000),
            forward_only_ns=(900, 2700),
            parameter_bytes=8000,
            activation_bytes_per_sample=400,
            weight_grad_activation_bytes_per_sample=400,
            boundary_bytes_per_sample=40,
        )
        for index in range(4)
    )
    return Profile(
        name="small",
        microbatch_samples=(1, 4),
        layers=layers,
        tied_layers=((0, 1),),
        skips=((0, 1),),
    )


def _cluster() -> Cluster:
    return Cluster(
        num_nodes=2,
        devices_per_node=2,
        device_memory_bytes=10**6,
        device_link_bytes_per_s=10**9,
        network_bytes_per_s=10**9,
    )


def _plan(profile: Profile, cluster: Cluster) -> Plan:
    first = search(profile, cluster, global_batch=16)
    return replan(
        profile,
        cluster,
        current=first,
        boundary=2,
        remaining_steps=1000,
        global_batch=16,
    )


def _history(transition: Transition | None) -> History:
    if transition is None:
        raise RuntimeError("plan: expected a transition, got none; please report")
    first, second = PlanShape(0, 0, 2, 2, 4), PlanShape(2, 2, 1, 4, 4)
    history = History(world_size=4, seed=0, total_seconds=8.0)
    history.add(TransformationRecord(0, None, first, 0.25, {}, "the first"))
    phases = {"prepare": 0.03, "prepare/group": 0.02, "first_step": 0.002}
    history.add(
        TransformationRecord(
            1,
            first,
            second,
            0.045,
            phases,
            "K=1 is shorter",
            transition.to_dict(),
            moved_bytes=29_881,
            group="cached",
        )
    )
    history.aborted.append(AbortRecord(1, 10, second, 12.0, {}, "rank 3: no room"))
    history.recoveries.append(RecoveryRecord(1, 17, [1], second, None, 10.5, phases))
    history.refusals.append(RefusalRecord(2, transition.to_dict()))
    history.epochs.append(
        EpochRecord(
            epoch=0,
            shape=first,
            samples=100,
            unique_samples=100,
            optimizer_steps=10,
            seconds=1.0,
            train_loss=0.5,
            cache_hits=0,
            cache_misses=0,
            predicted_step_ns=10**8,
        )
    )
    history.phase_seconds = {"forward": 6.0, "backward": 2.0}
    return history


def _state() -> TrainingState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    state = TrainingState(model, step=7, epoch=1, batch=2, num_batches=9, pass_nodes=1)
    state.build_optimizer(
        list(model.parameters()),
        torch.optim.AdamW,
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    )
    model(torch.ones(4, 2)).sum().backward()
    assert state.optimizer is not None
    state.optimizer.step()
    state.metrics = {"loss": 0.5}
    state.note_boundary(1)
    return state


def _checkpoint() -> Kind:
    extra = {
        "policy": {"frozen": 1},
        "pass": {"samples": 100, "seed": 0},
        "run_id": "0123456789abcdef",
        "plan": None,
        "profile": None,
        "pauses": {},
        "reshaped_ns_ago": None,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.pt"
        checkpoint.save(path, _state(), extra)
        whole = path.read_bytes()
        content = checkpoint.read(path)

    def damaged(rng: random.Random) -> bytes:
        how = rng.randrange(10)
        if how < 2:
            return damaged_bytes(rng, whole)
        if how < 5:
            return damaged_archive(rng, whole)
        if how < 8:
            return tensor_file(damaged_tree(rng, content))
        message = io.BytesIO(content["optimizer_message"])
        tree = torch.load(message, weights_only=True)
        packed = tensor_file(damaged_tree(rng, tree))
        return tensor_file({**content, "optimizer_message": packed})

    return Kind("step-0000000007.pt", damaged, read_checkpoint)


def read_checkpoint(path: Path) -> bool:
    """Read a checkpoint as `resume` does; return whether it was taken.

    Raises:
        Fault: a refusal that does not name the file, or for want of memory.
    """
    state = _state()
    try:
        content = checkpoint.read(path)
        checkpoint.check_model(content, state, path)
        checkpoint.load_model(content, state)
        checkpoint.load_optimizer_state(content, state)
    except ValueError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError):
                raise Fault("checkpoint: expected a bound of memory") from error
            cause = cause.__cause__ or cause.__context__
        text = str(error)
        if str(path) not in text or ": expected " not in text or len(text) > 2000:
            raise Fault(
                f"error: expected the file's name, got {text[:200]!r}"
            ) from error
        return False
    return True
