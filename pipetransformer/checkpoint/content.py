"""What a run puts into a checkpoint, and how it takes it back."""

from __future__ import annotations

import copy
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core.devices import HOST, to_device
from pipetransformer.core.wire import printable
from pipetransformer.replica.replica import Replica
from pipetransformer.run.context import Run
from pipetransformer.state.state import (
    describe_optimizer,
    load_moments,
    load_registered,
    make_optimizer,
    make_scheduler,
    naming,
)

_LOG = logging.getLogger(__name__)


def save(
    run: Run,
    replica: Replica | None,
    path: str | os.PathLike[str],
    *,
    replace: bool = True,
    before: Mapping[str, int] | None = None,
) -> None:
    """Write a checkpoint of this rank's state.

    Args:
        run: The run.
        replica: What this rank drives, or None.
        path: The file.
        replace: False: an older file of that name is kept.
        before: See `checkpoint.save`.

    Raises:
        ValueError: no plan has been in force yet, or a checkpoint did not load.
        UnreadableState: a state holds more than tensors and plain values.
        OSError: the file could not be written; what is there is whole.
        FloatingPointError: the last loss was on a device, and is NaN or Inf.
    """
    run.read_loss()
    if run.state.optimizer is None:
        raise ValueError(
            "save: expected a call after prepare or batches, got one before"
        )
    if run.loaded is not None:
        raise ValueError(
            f"save: expected a state that is loaded whole, got that of "
            f"{run.loaded['name']}, of which a part did not load"
        )
    workload, profile = run.inputs.workload, run.inputs.profile
    batches = workload.describe() if workload is not None else {}
    extra = {
        "policy": run.policy.state_dict(),
        "pass": {**batches, "seed": run.config.seed},
        "optimizer": describe_optimizer(run.state.optimizer, run.arguments.model),
        "kinds": {
            "policy": type(run.policy).__name__,
            "scheduler": _kind_of(run.state.scheduler),
        },
        "run_id": run.info.run_id,
        "plan": replica.plan.to_json() if replica is not None else None,
        "profile": profile.to_json() if profile is not None else None,
        "pauses": run.costs.state(),
        "reshaped_ns_ago": run.costs.elapsed_ns(),
    }
    checkpoint.save(
        path, run.state, extra, weights=weights(run), replace=replace, before=before
    )
    run.history.counters.checkpoints_written += 1


def weights(run: Run) -> dict[str, Tensor]:
    """Return the plain model's ``state_dict`` as it was between two steps, on the host.

    What is there is not copied.

    Raises:
        FloatingPointError: the last loss was on a device, and is NaN or Inf.
    """
    run.read_loss()
    named: dict[str, Tensor] = run.arguments.model.state_dict()
    before = run.step_buffers.before_step() or {}
    named.update((name, value) for name, value in before.items() if name in named)
    return named if run.slots.on_host else each_once(named, lambda v: v.to(HOST))


def each_once(
    named: Mapping[str, Any], copied: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Copy values of a ``state_dict``; tied weights are one tensor in the copy, too.

    Args:
        named: By name; what `get_extra_state` gives is no tensor.
        copied: Gives the copy of a tensor on the host.
    """
    copies: dict[Any, Tensor] = {}
    found: OrderedDict[str, Any] = OrderedDict()
    if hasattr(named, "_metadata"):  # what modules know versions by
        found._metadata = named._metadata  # type: ignore[attr-defined]
    for name, value in named.items():
        if not isinstance(value, Tensor):
            found[name] = copy.deepcopy(to_device(value, HOST))
            continue
        place: Any = name
        if value.layout == torch.strided and value.data_ptr():
            where = value.data_ptr(), value.shape, value.stride()
            kind = type(value), value.dtype, value.is_conj(), value.is_neg()
            place = (value.device, *where, *kind)
        if place not in copies:
            copies[place] = copied(value.detach())
        found[name] = copies[place]
    return found


def restore(run: Run, path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Load weights and counters now, optimizer state with the first plan.

    On the lead: the others take everything over from it.

    Args:
        run: The run, before its first plan.
        path: Where the content comes from, for error texts.
        content: From ``checkpoint.read``.

    Raises:
        ValueError: a checkpoint of another model or optimizer, or one that does not
            load, or without a policy's state.
    """
    checkpoint.check_model(content, run.state, path)
    what, extra = f"checkpoint {os.fspath(path)}", content["extra"]
    num_units = len(run.arguments.unit_ends)
    for name in ("wanted_units", "frozen_units"):
        if content["progress"][name] > num_units:
            raise ValueError(
                f"{what}: expected at most {num_units} {name}, as this model has, "
                f"got {content['progress'][name]}"
            )
    if "policy" not in extra:
        raise ValueError(f"{what}: expected a freeze policy's state, got none")
    _try_optimizer(run, content)
    _load_policy(run, content)
    with naming(content, "measured pauses"):
        if "pauses" in extra:  # older checkpoints have none
            run.costs.load(extra["pauses"])
        run.costs.load_elapsed(extra.get("reshaped_ns_ago"))
    checkpoint.load_model(content, run.state)
    run.loaded = content
    run.is_resumed = True


def _try_optimizer(run: Run, content: dict[str, Any]) -> None:
    """Load the state of optimizer and scheduler on trial.

    The run's own are built with the first plan, and would be half loaded then.

    Raises:
        ValueError: it is that of other ones.
    """
    arguments, joined = run.arguments, content["joined"]
    with naming(content, "the optimizer's state"):
        trial = make_optimizer(arguments.optimizer, list(arguments.parameters))
        factory = arguments.lr_scheduler
        rates = make_scheduler(factory, trial) if factory is not None else None
    saved = content["extra"].get("optimizer")
    if saved is not None:  # older checkpoints do not tell
        now = describe_optimizer(trial, arguments.model)
        _compare_optimizers(now, saved, content["name"])
    with naming(content, "the optimizer's state"):
        load_moments(trial, joined)
    kinds = content["extra"].get("kinds")
    if kinds is not None:  # older checkpoints do not tell
        _compare_schedulers(_kind_of(rates), kinds["scheduler"], content["name"])
    if rates is not None and joined["scheduler"] is not None:
        with naming(content, f"the state of {type(rates).__name__}"):
            rates.load_state_dict(joined["scheduler"])


def _kind_of(scheduler: LRScheduler | None) -> str:
    return "" if scheduler is None else type(scheduler).__name__


def _compare_schedulers(now: str, saved: str, what: str) -> None:
    """Refuse a scheduler of another class, whose state would be a mixture of both.

    Raises:
        ValueError: it is of another one.
    """
    if now == saved:
        return
    saved = printable(saved, longest=500)
    if now and saved:
        raise ValueError(
            f"{what}: expected the state of an lr_scheduler {now}, as here, got that "
            f"of {saved}"
        )
    if now:
        _LOG.warning(
            "%s was written without an lr_scheduler: %s begins anew, by steps at its "
            "first, by epochs at the epoch that is reached",
            what,
            now,
        )
    else:
        _LOG.warning(
            "%s holds the state of %s, and there is none here: learning rates stay as "
            "they were",
            what,
            saved,
        )


def _load_policy(run: Run, content: dict[str, Any]) -> None:
    """Load the state of the freeze policy; warn of one by another policy.

    Raises:
        ValueError: it does not load.
    """
    extra, now = content["extra"], type(run.policy).__name__
    saved = printable(extra.get("kinds", {}).get("policy", now), longest=500)
    by = "" if saved == now else f", as here, by {saved} where it was written"
    with naming(content, f"the state of {now}{by}"):
        run.policy.load_state_dict(extra["policy"])
    if by:
        _LOG.warning(
            "%s: freezing goes on by %s, and was decided by %s when it was written",
            content["name"],
            now,
            saved,
        )


def _compare_optimizers(
    now: Mapping[str, Any], saved: Mapping[str, Any], what: str
) -> None:
    """Refuse another optimizer than that of the checkpoint, naming the difference.

    Moments are kept by a parameter's place in its group.

    Raises:
        ValueError: its class, or a parameter in one of its groups, is another one.
    """

    def require(found: object, wanted: object, what_of: str) -> None:
        if found != wanted:
            got, here = (printable(str(x), longest=500) for x in (found, wanted))
            raise ValueError(f"{what}: expected {what_of} {here}, as here, got {got}")

    require(saved["kind"], now["kind"], "the state of the optimizer")
    sizes = [len(group) for group in saved["groups"]]
    require(sizes, [len(group) for group in now["groups"]], "groups of parameters of")
    pairs = zip(saved["groups"], now["groups"], strict=True)
    for number, (theirs, mine) in enumerate(pairs):
        for found, name in zip(theirs, mine, strict=True):
            require(found, name, f"in group {number} of the optimizer")


def check_registered(run: Run) -> None:
    """Refuse a checkpoint without the state of something that was registered.

    States of other names are left out, with a warning.

    Raises:
        ValueError: naming what is missing.
    """
    if run.loaded is None:
        return
    names = set(run.state.registered.names)
    saved = set(run.loaded["joined"].get("registered", {}))
    if names - saved:
        raise ValueError(
            f"{run.loaded['name']}: expected states of what is registered, "
            f"{', '.join(sorted(names))}, got none of "
            f"{', '.join(sorted(names - saved))}"
        )
    if saved - names:
        _LOG.warning(
            "%s: states that nothing is registered for are left out: %s",
            run.loaded["name"],
            printable(", ".join(sorted(saved - names)), longest=500),
        )


def restore_registered(run: Run) -> None:
    """Load what is registered, for a run that had finished and makes no plan.

    States that do not load without one, as of what needs the optimizer, are warned of.

    Raises:
        ValueError: a state is missing.
    """
    if run.loaded is None:
        return
    check_registered(run)
    for name in run.state.registered.names:
        try:
            load_registered(run.loaded, run.state, name)
        except ValueError as error:
            _LOG.warning(
                "%s; what is registered as '%s' is loaded with the first plan "
                "(engine.prepare)",
                error,
                name,
            )


def check_resumed_pass(run: Run) -> None:
    """Refuse to go on in the middle of an epoch whose batches would be others.

    Raises:
        ValueError: naming what the batches were made from, then and now.
    """
    if run.loaded is None or run.inputs.workload is None or run.state.batch == 0:
        return
    now = {**run.inputs.workload.describe(), "seed": run.config.seed}
    batches = run.loaded["extra"].get("pass", {})
    names = dict.fromkeys((*now, "weights") if "weights" in batches else now)
    saved = {name: batches[name] for name in names if name in batches}
    if saved != now:
        raise ValueError(
            "checkpoint from the middle of an epoch: expected the batches of "
            f"{printable(str(saved), longest=500)}, got {now}"
        )
