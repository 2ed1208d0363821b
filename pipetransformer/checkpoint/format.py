"""Checkpoints: one file, full-model names, written atomically, loads anywhere.

Nothing in the file depends on K, M, R or a rank, so it loads under any plan.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import pathlib
import re
import stat
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipetransformer.core import disk
from pipetransformer.core import tensor_files as files
from pipetransformer.core.wire import printable
from pipetransformer.pipe import accumulator_names
from pipetransformer.state.message import with_numbers
from pipetransformer.state.signature import model_signature
from pipetransformer.state.state import (
    TrainingState,
    load_observed,
    naming,
    pack_optimizer,
    plain,
    require_readable,
    unpack_optimizer,
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
_COUNTERS = {  # the least of each
    "step": 0,
    "epoch": 0,
    "batch": 0,
    "pass_nodes": 0,
    "decided_epoch": -1,
    "wanted_units": 0,
    "frozen_units": 0,
}
_MOST = 10**10 - 1  # the last step that the name of a file has room for
_LONGEST = 500  # letters of an error that what does not load raised
Fingerprint = tuple[str, int, int, int]
"""Name, inode, bytes and time of a file: another one when its content is."""


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
        extra: Plain values (numbers, strings, lists, dicts) stored alongside it: policy
            state, plan, profile.
        weights: In place of the model's present ``state_dict``.
        replace: False: an older file of that name is kept.
        before: For an automatic checkpoint, `times` of files of other runs; see
            `time_in_order`.

    Raises:
        OSError: the file could not be written; what is there of that name is whole.
        UnreadableState: a state holds more than tensors and plain values, so that
            nobody could read the file; nothing was written.
    """
    message, tensors = pack_optimizer(state)
    model = state.model.state_dict() if weights is None else weights
    extra = with_numbers(extra)
    others = {n: v for n, v in model.items() if not isinstance(v, Tensor)}
    require_readable({"extra": extra, "model": others})
    content = {
        "format": _FORMAT,
        "signature": model_signature(state.model),
        "model": model,
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

    Returns:
        Its parts as they were written; "joined": the state of the optimizer, which
        `load_model` and `load_optimizer_state` load; "name": what to call it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is torn, is not a checkpoint of this library, or holds
            values that no run can have written.
        OSError: it could not be read; names it.
        MemoryError: it did not fit into memory; names it.
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
    if type(found) is not int or found != _FORMAT:
        got = f"a {type(content).__name__} without" if found is None else plain(found)
        raise ValueError(
            f"{what}: expected a checkpoint of this library, format {_FORMAT}, "
            f"got {got}"
        )
    for name, kind in _PARTS.items():
        if not isinstance(content.get(name), kind):
            got = type(content[name]).__name__ if name in content else "none"
            raise ValueError(f"{what}: expected a part {name!r}, got {got}")
    return {**content, "joined": _checked(content, what), "name": what}


def _checked(content: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Check what a file with right checksums holds; return its optimizer's state."""

    def require(fits: bool, part: str, expected: str, got: object) -> None:
        if not fits:
            raise ValueError(
                f"{what}: expected {part} to be {expected}, got {plain(got)}"
            )

    progress, extra = content["progress"], content["extra"]
    for name, least in _COUNTERS.items():
        if name == "pass_nodes" and name not in progress:
            continue  # older checkpoints do not tell
        count = progress.get(name)
        part, expected = f"{name} of its progress", f"a count from {least}"
        require(_is_count(count, least), part, expected, count)
    batches = extra.get("pass", {})
    require(isinstance(batches, dict), "the pass", "a dict", batches)
    of = [batches.get(name) for name in ("num_samples", "batch_size")]
    if all(_is_count(number, 1) for number in of):
        most, batch = -(-of[0] // of[1]), progress["batch"]
        require(batch < most, "batch", f"one of {most} of its pass", batch)
    policy = extra.get("policy", {})
    require(isinstance(policy, dict), "policy", "a dict", policy)
    described = extra.get("optimizer", {"kind": "", "groups": []})
    fits = _is_described(described)
    require(fits, "optimizer", "a class and names by group", described)
    kinds = extra.get("kinds", {"policy": "", "scheduler": ""})
    fits = _is_dict(kinds, str, str) and {*kinds} >= {"policy", "scheduler"}
    require(fits, "kinds", "names of classes", kinds)
    tensors = content["optimizer_tensors"]
    for value in tensors:
        require(isinstance(value, Tensor), "optimizer_tensors", "tensors", value)
    for name in content["model"]:
        require(isinstance(name, str), "each name of its model", "a text", name)

    found = unpack_optimizer(content["optimizer_message"], tensors, what)
    joined: dict[str, Any] = found if isinstance(found, dict) else {}
    optimizer, scheduler = joined.get("optimizer"), joined.get("scheduler", ())
    require(isinstance(optimizer, dict), "optimizer", "a dict", optimizer)
    fits = scheduler is None or isinstance(scheduler, dict)
    require(fits, "scheduler", "a dict", scheduler)
    metrics = joined.get("metrics", {})  # older checkpoints have none
    fits = _is_dict(metrics, str, float | int)
    require(fits, "metrics", "numbers by name", metrics)
    sets = joined.get("sets", [])
    fits = isinstance(sets, list) and all(isinstance(each, str) for each in sets)
    require(fits, "sets", "names", sets)
    evaluated = joined.get("evaluated", {})
    fits = _is_dict(evaluated, str, int)
    require(fits, "evaluated", "counts by name", evaluated)
    freezes = joined.get("freezes", [])
    fits = isinstance(freezes, list) and all(_is_dict(f, str, int) for f in freezes)
    require(fits, "freezes", "counts by name", freezes)
    registered = joined.get("registered", {})
    fits = _is_dict(registered, str, dict)
    require(fits, "registered", "states by name", registered)
    sums = joined.get("gradients", {})
    require(_is_dict(sums, int, Tensor), "gradients", "tensors by number", sums)
    losses = joined.get("losses", [0.0, 0.0])
    fits = isinstance(losses, list) and [type(x) for x in losses] == [float, float]
    require(fits and all(map(math.isfinite, losses)), "losses", "two numbers", losses)
    return joined


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST


def _is_dict(value: object, key: Any, item: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, key) and isinstance(held, item) for name, held in value.items()
    )


def _is_described(value: object) -> bool:
    """Tell whether it is of the kind that `describe_optimizer` returns."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return False
    groups = value.get("groups")
    return isinstance(groups, list) and all(
        isinstance(group, list) and all(isinstance(name, str) for name in group)
        for group in groups
    )


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
        ValueError: names, shapes, dtypes or numbers of units differ.
    """
    # The first checkpoints of deferred batch norm have no accumulators.
    spare = accumulator_names(state.model)
    signatures = [model_signature(state.model, without=w) for w in ((), spare)]
    what = f"checkpoint {os.fspath(path)}"
    mine, theirs = state.model.state_dict(), content["model"]
    for name in [*mine, *theirs]:
        left, right = _described(mine, name), _described(theirs, name)
        if left != right and (name in theirs or name not in spare):
            printed = name if name.isprintable() else ascii(name)
            raise ValueError(
                f"{what}: expected {printed[:200]} with {left}, as in this model, "
                f"got {printable(right, longest=_LONGEST)}"  # of many dimensions
            )
    if content["signature"] not in signatures:
        raise ValueError(f"{what}: expected the same buffers, got a different set")


def _described(named: Mapping[str, Any], name: str) -> str:
    if name not in named:
        return "no such tensor"
    value = named[name]
    if not isinstance(value, Tensor):  # what a module adds to its state_dict
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {value.dtype}"


def load_model(content: dict[str, Any], state: TrainingState) -> None:
    """Copy weights, buffers, counters, what was observed and metrics into `state`.

    Before the first plan, which may begin with a freeze decision.

    Raises:
        ValueError: what the file holds does not load.
    """
    with naming(content, "the model's state"):
        load_observed(state, content["joined"])
        if state.losses is not None and "losses" in content["joined"]:
            state.losses.load(*content["joined"]["losses"])
        state.load_progress(content["progress"])
        state.model.load_state_dict(content["model"])


def path_of_step(directory: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Return the automatic checkpoint's path for an optimizer step."""
    return pathlib.Path(directory) / f"step-{step:010d}.pt"


def _listed(
    directory: str | os.PathLike[str],
) -> tuple[dict[pathlib.Path, int], list[pathlib.Path]]:
    """Return when each checkpoint of a folder was written, newest first.

    The second part is what has the name of one and is no file.

    Raises:
        OSError: the folder, or what it tells of a file, could not be read.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    found: list[tuple[int, pathlib.Path]] = []
    others: list[pathlib.Path] = []
    for name in filter(_NAME.fullmatch, names):
        path = pathlib.Path(directory, name)
        try:
            info = path.stat()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            with contextlib.suppress(FileNotFoundError):  # another rank has removed it
                path.lstat()
                others.append(path)  # a link to nothing
            continue
        if stat.S_ISREG(info.st_mode):
            found.append((info.st_mtime_ns, path))
        else:
            others.append(path)
    # By time, not by step: an older run in the same folder may have gone further.
    found.sort(reverse=True)
    return {path: time for time, path in found}, others


def times(directory: str | os.PathLike[str]) -> dict[str, int]:
    """Return when each automatic checkpoint of a folder was written, by name.

    They are in order, the newest first.

    Raises:
        OSError: the folder could not be read.
    """
    written, _ = _listed(directory)
    return {path.name: time for path, time in written.items()}


def _fingerprint(path: pathlib.Path) -> Fingerprint:
    info = path.stat()
    return path.name, info.st_ino, info.st_size, info.st_mtime_ns


def time_in_order(path: pathlib.Path, before: Mapping[str, int], written: int) -> int:
    """Return the time that gives a file which is written its place among the others.

    That is after all others, whatever the machine's clock says. But if the run has
    files of later steps, this rank slept while the others went on without it, and its
    file comes before theirs.

    Args:
        path: The file.
        before: `times` of files of other runs: of all that lay there when the run
            began, and of those that were noticed later.
        written: Its time by the clock; all times are in nanoseconds.

    Raises:
        OSError: the folder could not be read.
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
    """Return the newest valid checkpoint of a folder; None if it has no file of one.

    A file that was read and is wrong is skipped with a warning. One that could not be
    read may be whole: nothing older is taken in its place. What is no file (a FIFO, a
    folder, a device, a link to nothing) is no checkpoint.

    Raises:
        ValueError: there are files, and none of them is valid.
        OSError: one could not be read; names it.
        MemoryError: one did not fit into memory; names it.
    """
    written, others = _listed(directory)
    skipped = 0
    for path in written:
        try:
            content = read(path)
        except (ValueError, FileNotFoundError) as error:
            _LOG.warning("skipped: %s", error)
            skipped += 1
        except OSError as error:
            text = "a checkpoint that cannot be read may be whole, and is not skipped"
            found = OSError(error.errno, f"{error.strerror}: {text}")
            raise disk.about(found, path) from error
        else:
            _warn_of_stranger(path)
            return path, content
    for path in others:
        _LOG.warning("skipped: checkpoint %s: expected a file, got none", path)
    if skipped:
        raise ValueError(
            f"checkpoints in {os.fspath(directory)}: expected a valid one among "
            f"{skipped}, got none; move them away to begin anew"
        )
    return None


def _warn_of_stranger(path: pathlib.Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        owner = path.stat().st_uid
        if owner not in (0, os.geteuid()):
            _LOG.warning("checkpoint %s is the file of another user, %d", path, owner)


def prune(
    directory: str | os.PathLike[str],
    keep: int,
    *,
    saved: pathlib.Path | None = None,
    whole: set[Fingerprint] | None = None,
) -> None:
    """Delete checkpoints that are older than `keep` others, all of them whole.

    To be counted, those others are read to their ends. A problem is logged and not
    raised: nothing is lost by a file too many.

    Args:
        directory: The folder.
        keep: So many whole ones stay.
        saved: A file that `save` has just written, and read back. It stays, even where
            a run that writes to the same folder has written `keep` later ones.
        whole: Files that need not be read once more; becomes those that were counted.
    """
    known: set[Fingerprint] = set() if whole is None else whole
    counted: set[Fingerprint] = set()
    try:
        written, _ = _listed(directory)
    except OSError as error:
        _LOG.warning("no older checkpoint is deleted: %s", error)
        return
    for path in written:
        try:
            if len(counted) >= keep and path != saved:
                path.unlink(missing_ok=True)
                continue
            found = _fingerprint(path)
            if path != saved and found not in known:
                if len(written) <= keep:
                    continue  # none can go, so that nobody needs to know
                files.require_whole(path, f"checkpoint {path}")
            counted.add(found)
        except FileNotFoundError:
            continue  # another rank has removed it
        except (OSError, ValueError, MemoryError) as error:
            _LOG.warning("a checkpoint is neither counted nor deleted: %s", error)
    known.clear()
    known.update(counted)
