"""Profiles of earlier runs: a run under the same conditions measures nothing.

`PlanConfig.profile` names a folder, where each profile has a file of its own by what it
depends on, or one file, which must be of this run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pipetransformer._extension import hash_bytes
from pipetransformer.autocache import CacheRates
from pipetransformer.autocache.content import without_addresses
from pipetransformer.core import disk, text_files
from pipetransformer.core.devices import describe
from pipetransformer.core.wire import check_int, printable
from pipetransformer.data.structures import tensors_of
from pipetransformer.planner import Profile
from pipetransformer.run.context import Run
from pipetransformer.state.signature import model_signature, trainable_lines
from pipetransformer.state.state import describe_optimizer

_LOG = logging.getLogger(__name__)

_VERSION = 9
# Of all modules; the last one is where a model of transformers comes from.
_NO_SETTINGS = frozenset({*vars(nn.Module()), "name_or_path"})
_PLAIN = (bool, int, float, str, torch.dtype)
_LONGEST = 200  # letters of what a file holds, in errors


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run measures before its first plan.

    Attributes:
        profile: Of the layers.
        rates: Of the cache.
        cores_permille: Slots of a host that work at full speed together, in
            thousandths; 0: all of them.
    """

    profile: Profile
    rates: CacheRates
    cores_permille: int = 0


def conditions(
    run: Run, inputs: Any, sizes: list[int], cores: float | None
) -> dict[str, Any]:
    """Return what a profile depends on, as plain values.

    Args:
        run: The run.
        inputs: What the layers are measured with.
        sizes: Of micro-batches, in samples.
        cores: That slots share; None: they are planned as devices.
    """
    model, slots = run.arguments.model, run.slots
    trained = "\n".join(trainable_lines(model)).encode()
    rows = (f"{tuple(t.shape[1:])} {t.dtype}" for t in tensors_of(inputs))
    return {
        "model": model_signature(model),
        "layers": f"{len(model)} {_settings_of(model)}",
        "trained": f"{hash_bytes(trained):016x}",
        "inputs": ", ".join(rows),
        "microbatch_samples": sizes,
        "device": describe(slots.devices[slots.own]),
        "threads": run.threads_per_stage if slots.on_host else 0,
        "slots": run.num_slots,
        "cores": cores,
        "amp": run.config.amp or "",
        "optimizer": _kind_of(run.state.optimizer, model),
        "torch": str(torch.__version__),
    }


def _settings_of(model: nn.Module) -> str:
    """Return the hash of what decides over the costs of modules, as they tell it."""
    lines = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        attention = getattr(config, "_attn_implementation", "")
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        plain = [
            f"{key}={value!r}"
            for key, value in sorted(vars(module).items())
            if key not in _NO_SETTINGS and _is_plain(value)
        ]
        lines.append(f"{name} {kind} {module.extra_repr()} {attention} {plain}")
    text = without_addresses("\n".join(lines))
    return f"{hash_bytes(text.encode()):016x}"


def _is_plain(value: object) -> bool:
    """Tell whether a value is a setting that is the same in another run."""
    if isinstance(value, tuple | list):
        return all(type(entry) in _PLAIN for entry in value)
    if type(value) is str:
        return os.sep not in value  # else of a place that this run has
    return type(value) in _PLAIN


def _kind_of(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> str:
    """Return the optimizer's class, its groups, and which of their options are on."""
    if optimizer is None:
        raise RuntimeError("profile without an optimizer; please report")
    groups = (
        " ".join(
            name
            for name, value in sorted(group.items())
            if name in optimizer.defaults and name != "lr"
            if isinstance(value, int | float) and value
        )
        for group in optimizer.param_groups
    )
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    options = ", ".join(dict.fromkeys(groups))
    held = repr(describe_optimizer(optimizer, model)["groups"]).encode()
    return f"{kind} {options} {hash_bytes(held):016x}"


def rate_conditions(run: Run) -> dict[str, Any]:
    """Return what rates of the cache depend on besides the profile."""
    workload, cache = run.inputs.workload, run.config.cache
    if workload is None:
        return {}
    folder = cache.disk_directory
    return {
        "cache": [cache.enabled, cache.admission, cache.debug],
        "disk": None if folder is None else os.fspath(folder),
        "device_bytes": cache.device_bytes,
        "samples": workload.num_samples,
        "global_batch": workload.global_batch,
        "hashes": workload.hashes,
    }


def measured_or_kept(
    run: Run,
    depends_on: Mapping[str, Any],
    *,
    measure: Callable[[], Profile],
    rates: Callable[[Profile], CacheRates],
    cores: Callable[[Profile], int],
) -> Measured:
    """Return a kept profile, or measure one and keep it where that is wanted.

    Args:
        run: The run.
        depends_on: From `conditions`.
        measure: Measures the layers.
        rates: Measures the cache.
        cores: Measures slots together.

    Raises:
        ValueError: the file that was named holds no profile of this run; says how it
            differs.
        OSError: it cannot be read.
    """
    wanted = run.config.plan.profile
    if wanted is None:
        profile = measure()
        return Measured(profile, rates(profile), cores(profile))
    path, is_folder = _place(wanted, depends_on)
    kept = _read(path, depends_on, strict=not is_folder)
    if kept is None:
        profile, kept = measure(), {}
        together = cores(profile)
    else:
        profile, together = kept["profile"], kept["cores_permille"]
        _LOG.info("layers are not measured: %s has their profile", path)
    told = kept.get("rates") or {}
    if told.get("conditions") == rate_conditions(run):
        found = CacheRates.from_dict(told["values"])
        # What could not be measured may be well again: a disk, or memory of a device.
        disk_told = found.disk is not None or run.config.cache.disk_directory is None
        if disk_told and (found.device is not None or run.device_cache_bytes == 0):
            return Measured(profile, found, together)
    result = Measured(profile, rates(profile), together)
    _write(run, path, depends_on, result)
    return result


def _place(
    wanted: str | os.PathLike[str], depends_on: Mapping[str, Any]
) -> tuple[pathlib.Path, bool]:
    """Return the file, and whether it is one of a folder's."""
    path = pathlib.Path(wanted)
    if path.is_file() or (path.suffix == ".json" and not path.is_dir()):
        return path, False
    text = json.dumps(depends_on, sort_keys=True).encode()
    return path / f"profile-{hash_bytes(text):016x}.json", True


def _read(
    path: pathlib.Path, depends_on: Mapping[str, Any], *, strict: bool
) -> dict[str, Any] | None:
    """Return what a file holds; None if it is not there, or not of this run.

    Args:
        path: The file.
        depends_on: From `conditions`.
        strict: Raise where it is of another run.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        if strict:
            raise
        _LOG.warning("no profile is read: %s", error)
        return None
    try:
        return _checked(data.decode(), depends_on)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        told = printable(str(error), longest=_LONGEST)
        if strict:
            raise ValueError(
                f"PlanConfig.profile: expected a profile of this run in {path}, got "
                f"{told}"
            ) from None
        _LOG.warning("%s is no profile of this run, measured anew: %s", path, told)
        return None


def _checked(text: str, depends_on: Mapping[str, Any]) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        raise ValueError(f"something other than a kept profile of version {_VERSION}")
    found = content.get("conditions")
    if not isinstance(found, dict):
        raise ValueError("no conditions")
    for name, value in depends_on.items():
        if found.get(name) != value:
            raise ValueError(f"{name} {found.get(name)!r} where this run has {value!r}")
    profile = Profile.from_json(json.dumps(content["profile"]))
    rates = content.get("rates")
    if rates is not None:
        _ = rates["conditions"], CacheRates.from_dict(rates["values"])
    together = check_int(content["cores_permille"], "cores_permille")
    return {"profile": profile, "rates": rates, "cores_permille": together}


def _write(
    run: Run, path: pathlib.Path, depends_on: Mapping[str, Any], result: Measured
) -> None:
    content = {
        "version": _VERSION,
        "conditions": dict(depends_on),
        "profile": json.loads(result.profile.to_json()),
        "cores_permille": result.cores_permille,
        "rates": {
            "conditions": rate_conditions(run),
            "values": result.rates.to_dict(),
        },
    }
    try:
        disk.make_folder(path.parent)
        text_files.replace(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:  # the run has all it needs
        _LOG.warning("the profile is not kept: %s", error)
