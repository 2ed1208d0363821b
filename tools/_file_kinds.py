"""The kinds of files that the product reads: whole ones, and how reading may end."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import re
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import pipetransformer as pt
from _damage import (
    TOKEN,
    damaged_archive,
    damaged_bytes,
    damaged_json,
    damaged_tree,
    tensor_file,
)
from pipetransformer.checkpoint import format as checkpoint
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
from pipetransformer.run.measured_costs import MeasuredCosts
from pipetransformer.state.state import TrainingState, load_optimizer_state

MOST_LETTERS = 20_000_000  # of output; an input has 300,000 at most
_LEFT_OUT = ("/tied_layers", "/skips")  # of canonical texts, where they are empty
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
        folder: For the whole files that a command reads alongside the damaged one.
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

    def read_profile(path: Path) -> bool:
        taken = run_command(["plan", "--profile", str(path), *given[2:], *batch])
        return taken and require_kept(path, Profile.from_json)

    def read_cluster(path: Path) -> bool:
        taken = run_command(["plan", *given[:2], "--cluster", str(path), *batch])
        return taken and require_kept(path, Cluster.from_json)

    def read_plan(path: Path) -> bool:
        taken = run_command(["explain", str(path)])
        if taken:  # of another model, mostly: then that is said
            run_command(["explain", str(path), *given])
            run_command(["simulate", "--plan", str(path), *given])
        return taken and require_kept(path, Plan.from_json)

    def read_summary(path: Path) -> bool:
        taken = run_command(["explain", str(path)])
        return taken and run_command(["explain", str(path), "--json"])

    readers = {
        "profile.json": read_profile,
        "cluster.json": read_cluster,
        "plan.json": read_plan,
        "summary.json": read_summary,
    }
    found = [Kind(name, damaged(name), read) for name, read in readers.items()]
    return {kind.name: kind for kind in (*found, *_checkpoints())}


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
    raw = set(filter(_is_control, set(shown))) - {"\n"}
    if raw:
        raise Fault(f"output: expected no control characters, got {sorted(raw)}")
    if code not in (output.OK, output.NEGATIVE, output.BAD_INPUT):
        raise Fault(f"exit code: expected 0, 1 or 2, got {code}")
    if code == output.BAD_INPUT and not _DOCUMENTED.fullmatch(err.getvalue()):
        raise Fault(f"error: expected the documented line, got {err.getvalue()!r}")
    return code != output.BAD_INPUT


class Canonical(Protocol):
    """What was read from a JSON text."""

    def to_json(self) -> str:
        """Return it as text."""


def require_kept(path: Path, read: Callable[[str], Canonical]) -> bool:
    """Return True if all that a text says, and nothing odd, is in what was read.

    Judged without the reader's own rules, by those of docs/formats.md.

    Args:
        path: A file that was taken.
        read: Reads its text.

    Raises:
        Fault: something is lost, another value, or breaks a rule.
    """
    text = path.read_text(encoding="utf-8")
    said = json.loads(text, object_pairs_hook=_each_once, parse_constant=_refuse)
    _require_same(said, json.loads(read(text).to_json()), "")
    return True


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise Fault("text: expected each name once")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise Fault(f"text: expected JSON, got {constant}")


def _require_same(said: Any, kept: Any, where: str) -> None:
    if isinstance(said, dict):
        for name, value in said.items():
            if not isinstance(kept, dict) or name not in kept:
                if value == [] and f"{where}/{name}" in _LEFT_OUT:
                    continue
                raise Fault(f"{where}: expected {name[:80]!r} refused, got it dropped")
            _require_same(value, kept[name], f"{where}/{name}")
    elif isinstance(said, list):
        if not isinstance(kept, list) or len(kept) != len(said):
            raise Fault(f"{where}: expected a list of {len(said)}, got another")
        for index, value in enumerate(said):
            _require_same(value, kept[index], f"{where}/{index}")
    else:
        _require_allowed(said, where)
        # A whole number may stand for a float, and not the other way round.
        same = said == kept and isinstance(said, bool) == isinstance(kept, bool)
        if not same or (isinstance(said, float) and not isinstance(kept, float)):
            raise Fault(f"{where}: expected {said!r} kept or refused, got {kept!r}")


def _require_allowed(value: Any, where: str) -> None:
    if isinstance(value, str):
        longest = 256 if where.endswith("/name") else 4096
        if len(value) > longest or any(map(_is_control, value)):
            raise Fault(f"{where}: expected a text refused, got {value[:80]!r}")
    elif isinstance(value, int | float):
        most = 2**64 - 1 if where.endswith("_hash") else 2**62
        least = -most if where.endswith("/gain_ns_per_step") else 0
        if not least <= value <= most:  # nor is NaN
            raise Fault(f"{where}: expected a number refused, got {value!r}")


def _is_control(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cs")


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
            transition,
            moved_bytes=29_881,
            group="cached",
        )
    )
    history.aborted.append(AbortRecord(1, 10, second, 12.0, {}, "rank 3: no room"))
    history.recoveries.append(RecoveryRecord(1, 17, [1], second, None, 10.5, phases))
    history.refusals.append(RefusalRecord(2, transition))
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


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def _scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def _state(seed: int) -> TrainingState:
    state = TrainingState(_model(seed), num_batches=9)
    parameters = list(state.model.parameters())
    state.build_optimizer(parameters, torch.optim.AdamW, _scheduler)
    return state


@functools.cache
def _engine() -> pt.PipeTransformer:
    """Return this process's engine, open until the process ends."""
    engine = pt.PipeTransformer(
        _model(1),
        loss=nn.MSELoss(),
        optimizer=torch.optim.AdamW,
        lr_scheduler=_scheduler,
        freeze=pt.freeze.Manual(),
    )
    return engine.__enter__()


def _trained_state() -> TrainingState:
    state = _state(0)
    state.step, state.epoch, state.batch, state.pass_nodes = 7, 1, 2, 1
    state.model(torch.ones(4, 2)).sum().backward()
    assert state.optimizer is not None
    state.optimizer.step()
    state.metrics = {"loss": 0.5}
    state.note_boundary(1)
    return state


def whole_checkpoint_bytes() -> bytes:
    """Return the checkpoint that damaged ones are made from."""
    extra = {
        "policy": pt.freeze.Manual().state_dict(),
        "pass": {"num_samples": 90, "batch_size": 10, "drop_last": False, "seed": 0},
        "run_id": "0123456789abcdef",
        "plan": None,
        "profile": None,
        "pauses": MeasuredCosts().state(),
        "reshaped_ns_ago": 10**9,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.pt"
        checkpoint.save(path, _trained_state(), extra)
        return path.read_bytes()


def _checkpoints() -> tuple[Kind, Kind]:
    """Return one kind whose checksums are right, and one of changed bytes."""
    whole = whole_checkpoint_bytes()
    content = torch.load(io.BytesIO(whole), weights_only=True)

    def damaged(rng: random.Random) -> bytes:
        how = rng.randrange(8)
        if how < 3:
            return damaged_archive(rng, whole)
        if how < 6:
            return tensor_file(damaged_tree(rng, content))
        message = io.BytesIO(content["optimizer_message"])
        tree = torch.load(message, weights_only=True)
        packed = tensor_file(damaged_tree(rng, tree))
        return tensor_file({**content, "optimizer_message": packed})

    def read_changed(path: Path) -> bool:
        found = read_checkpoint(path)
        if found is not None and not _same(content, {n: found.get(n) for n in content}):
            raise Fault("checkpoint: expected changed bytes refused, got them taken")
        return found is not None

    return (
        Kind("step-0000000007.pt", damaged, lambda p: read_checkpoint(p) is not None),
        Kind("step-0000000008.pt", lambda rng: damaged_bytes(rng, whole), read_changed),
    )


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint as `resume` does; return its parts if it was taken.

    Raises:
        Fault: a refusal that does not name the file, would obey its content, or is for
            want of memory; a file taken whose checksums are wrong, that is larger in
            memory than on disk, or whose counters and weights are not what is loaded.
    """
    state = _state(1)
    try:
        content = checkpoint.read(path)
        checkpoint.check_model(content, state, path)
        checkpoint.load_model(content, state)
        load_optimizer_state(content, state)
        _engine().load(path)
    except ValueError as error:
        _require_documented(error, path)
        return None
    with zipfile.ZipFile(path) as archive:
        packed = any(entry.compress_type for entry in archive.infolist())
        if packed or archive.testzip() is not None:
            raise Fault("checkpoint: expected stored entries with right checksums")
    for name, value in state.counters().items():
        told = content["progress"].get(name, 0)
        if type(told) is not int or told != value or not -1 <= value <= 2**62:
            raise Fault(f"checkpoint: expected {name} refused, got {value!r}")
    if not _same(content["model"], state.model.state_dict()):
        raise Fault("checkpoint: expected its weights loaded, got others")
    return content


def _require_documented(error: ValueError, path: Path) -> None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            raise Fault("checkpoint: expected a bound of memory") from error
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    if str(path) not in text or ": expected " not in text or len(text) > 2000:
        raise Fault(f"error: expected the file's name, got {text[:200]!r}") from error
    if any(_is_control(letter) for letter in text if letter != "\n"):
        raise Fault(f"error: expected no escapes, got {text!r}") from error


def _same(left: Any, right: Any) -> bool:
    """Tell whether two trees of plain values and tensors are equal, bit by bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        a, b = (t.detach().contiguous().flatten() for t in (left, right))
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            _same(left[name], right[name]) for name in left
        )
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and bool(left == right)
