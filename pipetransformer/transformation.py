"""The state machine of a change of plan.

::

    decide -> plan -> prepare -> commit -> move -> rewire -> resume
                         |
                         +-----> abort: go on with the old plan

All ranks pass through `perform`, standby ranks too. Until COMMIT everything new is
built beside what is in use, and nothing of the old plan is touched; so an abort
leaves the run as it was.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.autodp import (
    ActiveGroup,
    Transition,
    broadcast_tensors,
    build_group,
    compare_hashes,
    hash_tensors,
)
from pipetransformer.layout import Layout, joiners
from pipetransformer.pipe import Pipe, Workers
from pipetransformer.planner import Plan
from pipetransformer.prefix import FrozenPrefix
from pipetransformer.proposal import Proposal
from pipetransformer.replica import ActiveModel, DrawPosition, LastGradient, wrap
from pipetransformer.run import Run
from pipetransformer.state import allocate, load_optimizer, pack_optimizer

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass
class Replica:
    """What an active rank owns under one plan.

    Attributes:
        plan: The plan in force.
        group: The active group.
        workers: Worker threads, one per stage's device.
        prefix: The frozen layers, or None.
        pipe: The pipeline of the active layers.
        active_model: What DDP wraps.
        ddp: What the user sees as ``engine.model``.
        last_gradient: When backward has made this replica's last gradient.
    """

    plan: Plan
    group: ActiveGroup
    workers: Workers
    prefix: FrozenPrefix | None
    pipe: Pipe
    active_model: ActiveModel
    ddp: DistributedDataParallel | None
    last_gradient: LastGradient

    def retire(self, *, keep_group: bool) -> None:
        """Drop DDP, pipeline and workers; the group too unless it is kept."""
        self.active_model.retire()
        self.last_gradient.forget()
        self.ddp = None
        self.pipe.close()
        self.workers.close()
        if not keep_group:
            self.group.retire()


class Phases:
    """Wall-clock seconds of each phase of one transformation."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of `perform` on one rank.

    Attributes:
        committed: False: the old plan stays in force.
        proposal: What was proposed.
        replica: What this rank now drives; None on a standby.
        phases: Seconds per phase on this rank.
        reason: Why it was aborted; empty when it was not.
    """

    committed: bool
    proposal: Proposal
    replica: Replica | None
    phases: dict[str, float]
    reason: str = ""


def perform(
    run: Run, current: Replica | None, plan_epoch: int, proposal: Proposal | None
) -> Outcome:
    """Take this rank through one transformation.

    Args:
        run: The run.
        current: What this rank drives now; None on a standby.
        plan_epoch: Counter of the proposed plan.
        proposal: The plan, on the rank that writes it; the others receive it.

    Returns:
        The outcome, equal on every rank but for the replica.

    Raises:
        PeerFailure: a rank died or a deadline passed after COMMIT.
    """
    phases, layout = Phases(), run.layout
    with phases.phase("prepare"):
        transition = Transition(
            run.plane,
            plan_epoch,
            writer=proposal is not None,
            participants=range(run.info.world_size),
            timeout=run.config.autodp.protocol_timeout,
        )
        if proposal is not None:
            transition.announce(proposal.to_bytes())
        else:
            proposal = Proposal.from_bytes(transition.receive())
        group, error = _prepare_group(run, current, proposal)
        transition.acknowledge(error)
        committed = transition.decide()
    run.plane.set_epoch(plan_epoch)
    run.plan_epoch = plan_epoch  # an aborted number is never used again
    if not committed:
        if group is not None and (current is None or group is not current.group):
            group.retire()
        return Outcome(False, proposal, current, phases.seconds, transition.reason)
    if current is not None:
        current.retire(keep_group=group is current.group)
        run.recipe.model.zero_grad(set_to_none=True)
    _adopt(run, proposal)
    if group is None:
        return Outcome(True, proposal, None, phases.seconds)
    with phases.phase("move"):
        _move(run, group, layout, proposal)
    with phases.phase("rewire"):
        replica = _rewire(run, group, proposal)
    return Outcome(True, proposal, replica, phases.seconds)


def _prepare_group(
    run: Run, current: Replica | None, proposal: Proposal
) -> tuple[ActiveGroup | None, str | None]:
    """Build the new group beside the live one; an error becomes a refusal."""
    if run.info.rank not in proposal.layout.active:
        return None, None
    if current is not None and run.layout == proposal.layout:
        return current.group, None
    try:
        group = build_group(
            run.plane,
            name=f"g/{proposal.plan_epoch}",
            members=proposal.layout.active,
            config=run.config.autodp,
        )
    except (RuntimeError, ValueError) as error:
        run.plane.check()
        _LOG.warning("plan epoch %d: no group: %s", proposal.plan_epoch, error)
        return None, str(error)
    return group, None


def _adopt(run: Run, proposal: Proposal) -> None:
    """Take over counters and policy state; the lead's own are already these."""
    run.state.load_progress(proposal.progress)
    run.state.frozen_units = proposal.frozen_units
    run.policy.load_state_dict(dict(proposal.policy))
    run.prices.load(proposal.pauses)
    run.cache_slots = proposal.cache_slots
    run.layout = proposal.layout


def _move(
    run: Run, group: ActiveGroup, layout: Layout | None, proposal: Proposal
) -> None:
    """Give new replicas weights, moments and scheduler of replica 0.

    Everything goes over the new group, in place, in the order of names; nothing
    passes through a file.
    """
    state = run.state
    run.build_optimizer()
    run.restore_optimizer()
    new = joiners(layout, proposal.layout)
    if group.size == 1 or not new:
        return
    joining = run.info.rank in new and group.rank != 0
    message, tensors = pack_optimizer(state)
    message = group.all_gather_bytes(message if group.rank == 0 else b"")[0]
    joined = None
    if joining:
        joined, tensors = allocate(message)
    named = state.model_tensors()
    broadcast_tensors(
        group,
        [*named.values(), *tensors],
        source=0,
        bucket_bytes=run.config.autodp.transfer_bucket_bytes,
    )
    if joined is not None:
        load_optimizer(state, joined)
    moments = {f"optimizer {i}": tensor for i, tensor in enumerate(tensors)}
    compare_hashes(group, hash_tensors({**named, **moments}.items()))


def _rewire(run: Run, group: ActiveGroup, proposal: Proposal) -> Replica:
    """Freeze, cut, and build pipeline, prefix and DDP of the new plan."""
    plan, layers = proposal.plan, list(run.recipe.model)
    run.freezer.apply(plan.boundary)
    workers = Workers(plan.num_stages, intra_op_threads=run.threads_per_stage)
    prefix = None
    if plan.boundary > 0:
        prefix = FrozenPrefix(layers, plan.boundary, workers, run.clock)
        if run.workload is not None and prefix.refusal is None:
            run.open_cache("train", run.workload.num_samples)
    pipe = Pipe.from_plan(
        nn.Sequential(*layers[plan.boundary :]),
        cuts=[cut - plan.boundary for cut in plan.cuts],
        num_microbatches=plan.num_microbatches,
        checkpoint=plan.checkpoint,
        workers=workers,
        first_layer=plan.boundary,
        seed=proposal.seed,
    )
    first = group.rank * plan.num_microbatches
    model = ActiveModel(
        pipe,
        prefix,
        cache=run.training_cache,
        position=lambda: DrawPosition(run.state.step, first),
        write=run.will_read_again,
        clock=run.clock,
    )
    run.step_buffers.watch(model)
    ddp = wrap(model, group)
    run.freezer.assert_consistent()
    return Replica(
        plan=plan,
        group=group,
        workers=workers,
        prefix=prefix,
        pipe=pipe,
        active_model=model,
        ddp=ddp,
        last_gradient=LastGradient(layers[plan.boundary :]),
    )
