"""The freeze policy's evaluation points: what it is asked with, and what it wants.

Every active rank asks its own policy with the same numbers, so all want the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from pipetransformer.autodp import gather_at
from pipetransformer.autofreeze import (
    FreezeStatistics,
    boundary_of,
)
from pipetransformer.data.seeding import generators_kept
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.replica.replica import Replica
from pipetransformer.replica.unit_activations import unit_activations
from pipetransformer.run.context import Run
from pipetransformer.transformation.allowed_units import allowed_units
from pipetransformer.transformation.plan_search import progress_of

_PROBE_ROWS = 32


@dataclasses.dataclass(frozen=True)
class FreezeDecision:
    """How far to freeze.

    Attributes:
        units: Units frozen from the front.
        boundary: Index of the first active layer.
        reason: Text for people.
    """

    units: int
    boundary: int
    reason: str


def point_of(run: Run) -> int:
    """Return the number of the freeze policy's evaluation point that is reached.

    Point 0 is before training; then one comes with every epoch, or with every
    `Config.freeze_every` optimizer steps.
    """
    every = run.config.freeze_every
    return run.state.epoch if every is None else run.state.step // every


def is_due(run: Run) -> bool:
    """Tell whether a freeze decision falls to the step boundary that is reached."""
    return (
        run.config.freeze_every is not None and point_of(run) > run.state.decided_epoch
    )


@dataclasses.dataclass(frozen=True)
class Signals:
    """Means over the replicas since the last decision, as far as the policy needs them.

    Attributes:
        loss: Of the training rows.
        plasticity: Of the units.
    """

    loss: float | None = None
    plasticity: list[float] | None = None


def share_signals(run: Run, replica: Replica, *, ends: bool = False) -> Signals:
    """Exchange what replicas found since the last decision; collective.

    Args:
        run: The run.
        replica: What this rank drives.
        ends: The pass is over.

    Returns:
        The means by which every active rank decides.
    """
    losses, changes = run.state.losses, run.changes
    if losses is None and changes is None:
        return Signals()
    with run.clock.phase("signals"):
        point = point_of(run) + (ends and run.config.freeze_every is None)
        if changes is not None and point > run.state.decided_epoch:
            measure_changes(run, point, replica.prefix)
        own = {
            "loss": None if losses is None else losses.own,
            "plasticity": None if changes is None else changes.own,
        }
        told = json.dumps(own).encode()
        gathered = gather_at(replica.group, "a freeze decision", told)
        parts = [json.loads(part) for part in gathered]
        return Signals(
            None if losses is None else losses.settle(tuple(p["loss"]) for p in parts),
            None if changes is None else changes.settle(p["plasticity"] for p in parts),
        )


def gather_losses(run: Run, replica: Replica) -> None:
    """Give the lead all replicas' losses before the number of replicas changes.

    Collective; for a change of plan between two decisions, which settle them.
    """
    losses, group = run.state.losses, replica.group
    if losses is not None:
        told = json.dumps(losses.own).encode()
        parts = [tuple(json.loads(part)) for part in group.all_gather_bytes(told)]
        losses.gather(parts, keeps=group.rank == 0)


def know_signals(run: Run, signals: Signals) -> None:
    """Take over what other ranks have settled."""
    if run.state.losses is not None:
        run.state.losses.know(signals.loss)
    if run.changes is not None:
        run.changes.know(signals.plasticity)


def measure_changes(run: Run, point: int, prefix: FrozenPrefix | None) -> None:
    """Run the probe batch; compare with what its units gave at the point before.

    Args:
        run: The run.
        point: Number of the evaluation point.
        prefix: The frozen layers, which may rest; None: there are none.
    """
    changes, workload, arguments = run.changes, run.inputs.workload, run.arguments
    if changes is None or workload is None:
        return
    if run.probe_batch is None:
        with generators_kept():
            run.probe_batch = workload.sample(min(_PROBE_ROWS, workload.num_samples))

    def activations() -> Iterator[Tensor]:
        yield from unit_activations(
            arguments.model,
            arguments.unit_ends,
            run.probe_batch,
            most_rows=run.config.eval_microbatch_rows,
            seed=run.config.seed,
        )

    awake = contextlib.nullcontext() if prefix is None else prefix.awake()
    still, numerics = run.freezer.evaluating(), run.precision.autocast()
    with still, run.clock.phase("probe"), awake, torch.no_grad(), numerics:
        changes.measure(point, activations())


def take_decision(run: Run) -> None:
    """Ask the freeze policy at the evaluation point that is reached, once.

    Of an epoch it is taken when the epoch before ends, so that a checkpoint written
    there holds its result and not the statistics behind it.

    Source: paper section 3.1 (freeze algorithm).
    """
    state, point = run.state, point_of(run)
    if state.decided_epoch >= point:
        return
    with run.clock.phase("signals"):
        if point > 0:
            run.policy.observe(_measured(run))
        elif run.slots.on_host:  # else the layers are not where they will compute
            measure_changes(run, point, None)  # what the first pass is compared with
        state.wanted_units = run.policy.decide(progress_of(run, point))
    state.decided_epoch = point


def _measured(run: Run) -> FreezeStatistics:
    """Return what the policy needs of the interval that ends, which begins anew."""
    needs, gradients, losses = run.policy.needs, run.gradients, run.state.losses
    norms = l1 = loss = None
    if gradients is not None:
        boundary = boundary_of(run.arguments.unit_ends, run.state.frozen_units)
        norms = gradients.norms(boundary) if "gradient_norms" in needs else None
        l1 = gradients.l1_norms(boundary) if "gradient_l1" in needs else None
        gradients.reset()
    if losses is not None:
        losses.settle_alone()
        loss = losses.take()
    return FreezeStatistics(
        gradient_norms=norms,
        gradient_l1=l1,
        plasticity=None if run.changes is None else run.changes.take(),
        loss=loss,
    )


def decide(run: Run) -> FreezeDecision:
    """Return the decision in force within the structure rules."""
    take_decision(run)
    state, arguments = run.state, run.arguments
    units, held = allowed_units(run, state.wanted_units)
    boundary = boundary_of(arguments.unit_ends, units)
    if held is None and 0 < units == run.policy.starting_units:
        held = f"nothing trains before layer {boundary}"
    before = state.frozen_units
    if units == before:
        reason = f"{units} of {len(arguments.unit_ends)} units stay frozen"
    else:
        verb = "freezes" if units > before else "unfreezes"
        reason = f"{type(run.policy).__name__} {verb} units: {before} to {units}"
    log = run.policy.log
    told = [text for text in (log[-1]["why"] if log else "", held) if text]
    reason += f" ({'; '.join(told)})" if told else ""
    return FreezeDecision(units, boundary, reason)
