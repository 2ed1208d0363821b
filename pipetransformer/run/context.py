"""Everything of a run on one rank that outlives a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipetransformer import _C
from pipetransformer._extension import host_cores
from pipetransformer.autodp import (
    ActiveGroup,
    ControlPlane,
    GroupCache,
    LaunchInfo,
    build_group,
)
from pipetransformer.autofreeze import (
    ActivationChange,
    GradientAccumulator,
    LayerFreezer,
    LossSum,
)
from pipetransformer.config import Config
from pipetransformer.data import Batch
from pipetransformer.device import StreamTimes
from pipetransformer.planner import Plan
from pipetransformer.report import StepRecord, Throttle
from pipetransformer.report.clock import Clock
from pipetransformer.report.history import History
from pipetransformer.run.arguments import EngineArguments
from pipetransformer.run.caches import Caches
from pipetransformer.run.control_log import ControlLog
from pipetransformer.run.forecast import Forecast
from pipetransformer.run.measured_costs import MeasuredCosts
from pipetransformer.run.placement import Placement
from pipetransformer.run.plan_in_force import PlanInForce
from pipetransformer.run.plan_inputs import PlanInputs
from pipetransformer.run.precision import Precision
from pipetransformer.run.slots import slots_of
from pipetransformer.run.step_loss import StepLoss
from pipetransformer.state.state import TrainingState, load_optimizer_state
from pipetransformer.state.step_buffers import StepBuffers

_COPIES_PART = 0.9  # of the memory that a plan is predicted to leave free


class Run:
    """The parts of a run that every plan uses.

    Args:
        arguments: What the user asked for.
        plane: The control plane, open.
        clock: Running since the engine was opened.
    """

    def __init__(
        self, arguments: EngineArguments, plane: ControlPlane, clock: Clock
    ) -> None:
        self.arguments = arguments
        self.config = arguments.config
        self.plane = plane
        self.info: LaunchInfo = plane.info
        self._threads_set = torch.get_num_threads()  # by OMP_NUM_THREADS, or the script
        self.inputs = PlanInputs()
        self.caches = Caches(arguments, plane, self.inputs)
        self.clock = clock
        self.times = StreamTimes()
        self.control_log = ControlLog(plane)
        self.groups = GroupCache(
            self.config.autodp.cached_groups,
            self.build_group,
            generation=lambda: plane.generation,
        )
        self.in_force = PlanInForce()
        self.state = TrainingState(arguments.model, registered=arguments.registered)
        self.policy = arguments.policy
        self.freezer = LayerFreezer(arguments.model)
        self.gradients = (
            GradientAccumulator(arguments.model, arguments.unit_ends)
            if arguments.policy.needs & {"gradient_norms", "gradient_l1"}
            else None
        )
        self.state.gradients = self.gradients
        self.state.losses = LossSum() if "loss" in arguments.policy.needs else None
        self.changes = (
            ActivationChange() if "plasticity" in arguments.policy.needs else None
        )
        self.probe_batch: Any = None  # inputs, by which activations are compared
        self.slots = slots_of(self.config, self.info)
        self.placement = Placement(
            self.slots,
            plane,
            self.state,
            arguments.loss,
            self.config.autodp.protocol_timeout,
        )
        self.precision = Precision(self.config.amp, self.slots.type)
        self.state.scaler = self.precision.scaler
        self.history = History(
            world_size=plane.info.world_size, seed=arguments.config.seed
        )
        self.costs = MeasuredCosts()
        self.loaded: dict[str, Any] | None = None
        self.total_epochs = 0
        self.began_at = 0, 0  # steps and freeze decision of the first plan
        self.is_resumed = False  # from a checkpoint, where this rank knows of it
        self.wrote_report = False
        self.report_throttle = Throttle()  # of writing it between passes
        self.first_step: int | None = None  # steps done when the first plan came
        # With how many rows the loss was judged: two, since one has no halves.
        self.rows_judged = 0 if self.config.check_loss else 2
        self.warned_of_lone_replica = False  # where ranks go on after losses
        self.memory_limit: int | None = None  # of a slot, since a device ran out of it
        self.keeps_copies = True  # of records on devices, which have memory for them
        self.drops_copies = False  # as this rank's device has run out of it
        self.forecast: Forecast | None = None  # of the lead, with callbacks
        self.last_loss: StepLoss | None = None  # of the last forward of this replica
        self.own_loss: StepLoss | None = None  # that a script has given to backward
        self._divides_anew = _divides_anew(arguments.config, plane)
        self.untold: tuple[StepRecord, StepLoss | None] | None = None  # of the lead
        self.upcoming: Batch | None = None  # after the one handed out; if it is loaded
        self.step_buffers = StepBuffers(arguments.model, lambda: self.state.step)

    def build_group(
        self,
        name: str,
        members: Sequence[int],
        num_stages: int = 1,
        given_up: Callable[[], bool] | None = None,
    ) -> ActiveGroup:
        """Connect a new group of replicas, see `autodp.build_group`."""
        slots = self.slots
        block = tuple(dict.fromkeys(slots.of(slots.block(num_stages))))
        return build_group(
            self.plane,
            name=name,
            members=members,
            config=self.config.autodp,
            devices=() if slots.on_host else block,
            shares_devices=slots.shares(num_stages),
            given_up=given_up,
        )

    def group_devices(self, num_stages: int) -> int:
        """Return how many devices of each member a group of replicas connects."""
        slots = self.slots
        if slots.on_host:
            return 0
        # All blocks share devices alike, and this process may be in none.
        return len(set(slots.of(slots.block(num_stages, slot=0))))

    @property
    def is_lead(self) -> bool:
        """True on the first active rank that lives; before the first plan on rank 0."""
        layout = self.in_force.layout
        if layout is None:
            return self.info.rank == 0
        members = self.plane.members
        living = [rank for rank in layout.active if rank in members]
        return living[:1] == [self.info.rank]

    @property
    def plan_hash(self) -> str:
        """Names the plan in force and all before it."""
        return self.plane.plan_hash or ""

    def follow_plan(self, plan_hash: str) -> None:
        """Let the next plan follow one that this rank may have missed."""
        self.plane.plan_hash = plan_hash

    @property
    def num_slots(self) -> int:
        """Slots of this node that pipelines may use."""
        return len(self.slots.devices)

    @property
    def keeps_freed_memory(self) -> bool:
        """Whether what a step frees on the host stays there for the next one."""
        return self.slots.on_host and self.config.pipe.keep_freed_memory

    def give_back_memory(self) -> None:
        """Give what is free to the host, for processes that have more to do now."""
        if self.keeps_freed_memory:
            _C.core.give_back_freed_memory()

    @property
    def device_cache_bytes(self) -> int:
        """Memory of a pipeline's first device for copies of cached records."""
        cache = self.config.cache
        used = cache.enabled and not self.slots.on_host
        return (cache.device_bytes or 0) if used else 0

    def frozen_places(self, plan: Plan) -> list[torch.device]:
        """Return the device of each frozen layer under a plan."""
        return self.placement.frozen(plan, self.inputs.profile)

    def bytes_for_copies(self, plan: Plan) -> int:
        """Return how much of it copies may take beside what a plan takes there.

        That is predicted, so a part of what it leaves stays free.
        """
        if not self.keeps_copies:
            return 0
        wanted, cluster = self.device_cache_bytes, self.inputs.cluster
        if not plan.bytes_per_stage or cluster is None:
            return wanted
        left = cluster.device_memory_bytes - plan.bytes_per_stage[0]
        return max(0, min(wanted, int(left * _COPIES_PART)))

    @property
    def copied_bytes(self) -> int:
        """Memory that copies of cached records take on this process's device."""
        cache = self.caches.training()
        return 0 if cache is None else cache.device_bytes

    @property
    def threads_per_stage(self) -> int:
        """Intra-op threads of each CPU slot."""
        wanted = self.config.pipe.threads_per_stage
        cores = int(min(os.cpu_count() or 1, host_cores()))
        # Launchers may bind each process apart, so an affinity is not shared out.
        own = len(os.sched_getaffinity(0))
        fair = max(1, min(cores // self.num_slots, own))
        # A launcher of several processes sets 1 where nobody has set anything.
        nobody = self._threads_set == 1 and self.info.local_world_size > 1
        return wanted or (fair if nobody else min(fair, self._threads_set))

    def build_optimizer(self) -> None:
        """Build optimizer and scheduler when the rank first becomes active."""
        arguments = self.arguments
        self.state.build_optimizer(
            list(arguments.parameters), arguments.optimizer, arguments.lr_scheduler
        )

    def restore_optimizer(self) -> None:
        """Load the optimizer state of a checkpoint, once the optimizer is built."""
        if self.loaded is not None:
            load_optimizer_state(self.loaded, self.state)
            self.loaded = None

    def will_read_again(self) -> bool:
        """Tell whether a later pass, or run, will read what this pass would cache."""
        cache = self.config.cache
        again = self.state.epoch + (cache.views or 1)  # the next with the same samples
        return cache.directory is not None or again < self.total_epochs

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse after a failure; turn what a failure breaks into that failure."""
        self.plane.check()
        with self.plane.guard():
            yield

    def turn_to(self, batch: int, *, for_gradients: bool = True) -> None:
        """Note the batch that the user's loop uses, see `TrainingState.turn_to`.

        Raises:
            ValueError: the loop reads ahead where the plan changes within passes, which
                divides batches anew that ranks have been given already.
        """
        reads_ahead = self.state.turn_to(batch, for_gradients=for_gradients)
        if reads_ahead and self._divides_anew is not None:
            raise ValueError(
                "batches: expected a step with each batch before the next one is "
                f"taken, as {self._divides_anew}, got one with batch {batch} after a "
                "later one was taken"
            )

    def read_loss(self) -> None:
        """Read the last losses, which may be on a device yet, before weights are kept.

        Raises:
            FloatingPointError: one is NaN or Inf.
        """
        for loss in (self.last_loss, self.own_loss):
            if loss is not None:
                loss.read()

    def tell_step(self) -> None:
        """Tell the user of the last step, if that has waited for its loss."""
        if self.untold is not None:
            (record, loss), self.untold = self.untold, None
            value = 0.0 if loss is None else loss.value
            told = dataclasses.replace(record, loss=value)
            self.arguments.listeners.step(told)

    def is_finite(self) -> bool:
        """Tell whether no weight is NaN or Inf: only such weights are worth saving.

        Of those that train, frozen ones among them: a mask that the user never trains
        may be of Inf.
        """
        found: dict[torch.device, list[Tensor]] = {}
        for parameter in self.arguments.parameters:
            values = parameter.detach().isfinite().all()
            found.setdefault(parameter.device, []).append(values)
        return all(bool(torch.stack(each).all()) for each in found.values())

    def close(self) -> None:
        """Release the slabs and give the model back as the user built it."""
        self.caches.close()
        self.placement.close()
        self.freezer.apply(0)


def _divides_anew(config: Config, plane: ControlPlane) -> str | None:
    """Return why the batches of a pass may be divided anew within it; None: not so."""
    if config.plan.trial_steps:
        return "PlanConfig.trial_steps changes the plan between steps"
    if plane.info.world_size == 1:
        return None
    if config.freeze_every is not None:
        return "Config.freeze_every changes the plan between steps"
    if config.prepare_steps:
        return "Config.prepare_steps changes the plan between batches"
    if plane.survives:
        return "AutoDPConfig.on_peer_failure='continue' divides what lost ranks had"
    return None
