"""Checkpoints: one file, full-model names, written atomically, loads anywhere.

Nothing in the file depends on K, M, R or a rank, so it loads under any plan.
"""

from __future__ import annotations

import logging
import os
import pathlib
import pickle
import re
import secrets
import zipfile
from typing import Any

import torch

from pipetransformer.signature import model_signature
from pipetransformer.state import TrainingState, fill, load_optimizer, pack_optimizer

_LOG = logging.getLogger(__name__)
_FORMAT = 1
_NAME = re.compile(r"step-(\d{10})\.pt")


def save(
    path: str | os.PathLike[str], state: TrainingState, extra: dict[str, Any]
) -> None:
    """Write a checkpoint: temporary file, fsync, rename; mode 0600.

    Args:
        path: The file; its folder is made when missing.
        state: A rank's training state between two optimizer steps.
        extra: Plain values (numbers, strings, lists, dicts) stored beside it: policy
            state, plan, profile.

    Raises:
        OSError: the file could not be written; an older file of that name is intact.
    """
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    message, tensors = pack_optimizer(state)
    content = {
        "format": _FORMAT,
        "signature": model_signature(state.model),
        "model": state.model.state_dict(),
        "optimizer_message": message,
        "optimizer_tensors": tensors,
        "progress": state.progress(),
        "extra": extra,
    }
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # torch's writer hides the OSError
                raise OSError(f"checkpoint {target}: {error}") from error
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint file without running any code from it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is torn, or is not a checkpoint of this library.
    """
    what = f"checkpoint {os.fspath(path)}"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (
        RuntimeError,
        EOFError,
        OSError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        first = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
        raise ValueError(f"{what}: expected a complete file, got: {first}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != _FORMAT:
        raise ValueError(f"{what}: expected format {_FORMAT}, got {found!r}")
    return dict(content)


def check_model(
    content: dict[str, Any], state: TrainingState, path: str | os.PathLike[str]
) -> None:
    """Refuse a checkpoint of another model, naming the first difference.

    Raises:
        ValueError: names, shapes or dtypes differ.
    """
    if content["signature"] == model_signature(state.model):
        return
    what = f"checkpoint {os.fspath(path)}"
    mine, theirs = state.model.state_dict(), content["model"]
    for name in [*mine, *theirs]:
        left, right = (
            f"{tuple(d[name].shape)} {d[name].dtype}" if name in d else "no such tensor"
            for d in (mine, theirs)
        )
        if left != right:
            raise ValueError(
                f"{what}: expected {name} with {left}, as in this model, got {right}"
            )
    raise ValueError(f"{what}: expected the same buffers, got a different set")


def load_model(content: dict[str, Any], state: TrainingState) -> None:
    """Copy the checkpoint's weights, buffers and counters into `state`."""
    state.model.load_state_dict(content["model"])
    state.load_progress(content["progress"])


def load_optimizer_state(content: dict[str, Any], state: TrainingState) -> None:
    """Copy optimizer and scheduler state into `state`, whose optimizer is built."""
    joined = fill(content["optimizer_message"], content["optimizer_tensors"])
    load_optimizer(state, joined)


def path_of_step(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Return the automatic checkpoint's path for an optimizer step."""
    return pathlib.Path(directory) / f"step-{step:010d}.pt"


def _newest_first(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    folder = pathlib.Path(directory)
    if not folder.is_dir():
        return []
    named = (p for p in folder.iterdir() if _NAME.fullmatch(p.name))
    # By time, not by step: an older run in the same folder may have gone further.
    return sorted(named, key=lambda p: (p.stat().st_mtime_ns, p.name), reverse=True)


def newest_valid(
    directory: str | os.PathLike[str],
) -> tuple[pathlib.Path, dict[str, Any]] | None:
    """Return the newest readable checkpoint of a folder, or None.

    A torn file is skipped with a warning.
    """
    for path in _newest_first(directory):
        try:
            return path, read(path)
        except ValueError as error:
            _LOG.warning("skipped: %s", error)
    return None


def prune(directory: str | os.PathLike[str], keep: int) -> None:
    """Delete all but the newest `keep` automatic checkpoints."""
    for path in _newest_first(directory)[keep:]:
        path.unlink(missing_ok=True)
