"""Checkpoints: one file, full-model names, written atomically, loads anywhere.

Nothing in the file depends on K, M, R or a rank, so it loads under any plan.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipetransformer import files
from pipetransformer.pipe import accumulator_names
from pipetransformer.signature import model_signature
from pipetransformer.state import (
    TrainingState,
    fill,
    load_observed,
    load_optimizer,
    pack_optimizer,
)

_LOG = logging.getLogger(__name__)
_FORMAT = 1
_NAME = re.compile(r"step-(\d{10})\.pt")
_PARTS = {
    "signature": str,
    "model": dict,
    "optimizer_message": bytes,
    "optimizer_tensors": list,
    "progress": dict,
    "extra": dict,
}


def save(
    path: str | os.PathLike[str],
    state: TrainingState,
    extra: dict[str, Any],
    *,
    weights: Mapping[str, Tensor] | None = None,
    replace: bool = True,
    before: Mapping[str, int] | None = None,
) -> None:
    """Write a checkpoint: temporary file, fsync, rename; mode 0600.

    Args:
        path: The file; its folder is made when missing.
        state: A rank's training state between two optimizer steps.
        extra: Plain values (numbers, strings, lists, dicts) stored beside it: policy
            state, plan, profile.
        weights: In place of the model's present ``state_dict``.
        replace: False: an older file of that name is kept.
        before: For an automatic checkpoint, `times` of the folder when the run began;
            see `time_in_order`.

    Raises:
        OSError: the file could not be written; an older file of that name is intact.
    """
    message, tensors = pack_optimizer(state)
    content = {
        "format": _FORMAT,
        "signature": model_signature(state.model),
        "model": state.model.state_dict() if weights is None else weights,
        "optimizer_message": message,
        "optimizer_tensors": tensors,
        "progress": state.progress(),
        "extra": extra,
    }
    stamp = None
    if before is not None:
        stamp = functools.partial(time_in_order, pathlib.Path(path), before)
    files.write(path, content, replace=replace, stamp=stamp)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint file without running any code from it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is torn, or is not a checkpoint of this library.
    """
    what = f"checkpoint {os.fspath(path)}"
    content = files.read(path, what)
    if _is_state_dict(content):
        raise ValueError(
            f"{what}: expected a checkpoint, got a model's state_dict; load it into "
            "the model before the engine is made: "
            "model.load_state_dict(torch.load(path, weights_only=True))"
        )
    found = content.get("format") if isinstance(content, dict) else None
    if found != _FORMAT:
        got = f"a {type(content).__name__} without" if found is None else repr(found)
        raise ValueError(
            f"{what}: expected a checkpoint of this library, format {_FORMAT}, "
            f"got {got}"
        )
    for name, kind in _PARTS.items():
        if not isinstance(content.get(name), kind):
            got = type(content[name]).__name__ if name in content else "none"
            raise ValueError(f"{what}: expected a part {name!r}, got {got}")
    return dict(content)


def _is_state_dict(content: object) -> bool:
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(name, str) for name in content)
        and any(isinstance(value, Tensor) for value in content.values())
        and "format" not in content
    )


def export_checkpoint(
    path: str | os.PathLike[str], target: str | os.PathLike[str]
) -> None:
    """Write a checkpoint's weights as the plain model's ``state_dict``.

    Needs neither an engine nor the model. The file loads into the model that was
    trained: ``model.load_state_dict(torch.load(target, weights_only=True))``.

    Args:
        path: A checkpoint.
        target: The file to write, whole or not at all.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is torn, or no checkpoint of this library; a target without a
            file's name.
        OSError: the file could not be written.
    """
    files.write(target, read(path)["model"])


def check_model(
    content: dict[str, Any], state: TrainingState, path: str | os.PathLike[str]
) -> None:
    """Refuse a checkpoint of another model, naming the first difference.

    Raises:
        ValueError: names, shapes or dtypes differ.
    """
    # The first checkpoints of deferred batch norm have no accumulators.
    spare = accumulator_names(state.model)
    signatures = [model_signature(state.model, without=w) for w in ((), spare)]
    if content["signature"] in signatures:
        return
    what = f"checkpoint {os.fspath(path)}"
    mine, theirs = state.model.state_dict(), content["model"]
    for name in [*mine, *theirs]:
        left, right = (
            f"{tuple(d[name].shape)} {d[name].dtype}" if name in d else "no such tensor"
            for d in (mine, theirs)
        )
        if left != right and (name in theirs or name not in spare):
            raise ValueError(
                f"{what}: expected {name} with {left}, as in this model, got {right}"
            )
    raise ValueError(f"{what}: expected the same buffers, got a different set")


def load_model(content: dict[str, Any], state: TrainingState) -> None:
    """Copy weights, buffers, counters, gradient sums and metrics into `state`."""
    state.model.load_state_dict(content["model"])
    state.load_progress(content["progress"])
    load_observed(state, _packed(content))


def load_optimizer_state(content: dict[str, Any], state: TrainingState) -> None:
    """Copy optimizer and scheduler state into `state`, whose optimizer is built."""
    load_optimizer(state, _packed(content), observed=False)


def _packed(content: dict[str, Any]) -> dict[str, Any]:
    return fill(content["optimizer_message"], content["optimizer_tensors"])


def path_of_step(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Return the automatic checkpoint's path for an optimizer step."""
    return pathlib.Path(directory) / f"step-{step:010d}.pt"


def _newest_first(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    folder = pathlib.Path(directory)
    if not folder.is_dir():
        return []
    named = (p for p in folder.iterdir() if _NAME.fullmatch(p.name))
    # By time, not by step: an older run in the same folder may have gone further.
    return sorted(named, key=lambda p: (_written_ns(p), p.name), reverse=True)


def _written_ns(path: pathlib.Path) -> int:
    """Return when a file was written; 0 where another rank has just removed it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def times(directory: str | os.PathLike[str]) -> dict[str, int]:
    """Return when each automatic checkpoint of a folder was written, by name."""
    return {path.name: _written_ns(path) for path in _newest_first(directory)}


def time_in_order(path: pathlib.Path, before: Mapping[str, int], written: int) -> int:
    """Return the time that gives a file which is written its place among the others.

    That is after all others, whatever the machine's clock says. But if the run has
    files of later steps, this rank slept while the others went on without it, and its
    file comes before theirs.

    Args:
        path: The file.
        before: `times` of the folder when the run began: files of other runs.
        written: Its time by the clock; all times are in nanoseconds.
    """
    others = times(path.parent)
    others.pop(path.name, None)  # an older file, whose place it takes
    later = [
        time
        for name, time in others.items()
        if name > path.name and before.get(name) != time
    ]
    latest = max(others.values(), default=0)
    return min(later) - 1 if later else max(written, latest + 1)


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
