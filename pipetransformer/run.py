"""Everything of a run on one rank that outlives a plan."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pipetransformer.autocache import (
    ActivationCache,
    cacheable,
    record_bytes,
    slots_within,
)
from pipetransformer.autodp import (
    ActiveGroup,
    GroupCache,
    LaunchInfo,
    MessagePlane,
    build_group,
)
from pipetransformer.autofreeze import GradientAccumulator, LayerFreezer
from pipetransformer.checkpoint import load_optimizer_state
from pipetransformer.layout import Layout
from pipetransformer.memory import available_bytes
from pipetransformer.planner import Cluster, Profile
from pipetransformer.prices import Prices
from pipetransformer.recipe import Recipe, Workload
from pipetransformer.report.clock import Clock
from pipetransformer.report.history import History
from pipetransformer.script import ScriptLog
from pipetransformer.state import TrainingState
from pipetransformer.step_buffers import StepBuffers

_LOG = logging.getLogger(__name__)
_LAYOUT_SLACK_BYTES = 256  # alignment of the tensors of a record that has several


class PassCounter(Protocol):
    """What a training step reports to; see `pipetransformer.training.Pass`."""

    def begin_step(self) -> None:
        """Note that a forward begins."""

    def count(self, loss: float, rows: int, ids: Tensor | None) -> None:
        """Add one step of this replica."""


class Run:
    """The parts of a run that every plan uses.

    Args:
        recipe: What the user asked for.
        plane: The message plane, open.
        clock: Running since the engine was opened.
    """

    def __init__(self, recipe: Recipe, plane: MessagePlane, clock: Clock) -> None:
        self.recipe = recipe
        self.config = recipe.config
        self.plane = plane
        self.clock = clock
        self.info: LaunchInfo = plane.info
        self.script = ScriptLog(plane)
        self.groups = GroupCache(
            self.config.autodp.cached_groups,
            self.build_group,
            generation=lambda: plane.generation,
        )
        self.state = TrainingState(recipe.model)
        self.policy = recipe.policy
        self.freezer = LayerFreezer(recipe.model)
        self.gradients = (
            GradientAccumulator(recipe.model, recipe.unit_ends)
            if recipe.policy.needs_gradients
            else None
        )
        self.state.gradients = self.gradients
        self.history = History(
            world_size=plane.info.world_size, seed=recipe.config.seed
        )
        self.workload: Workload | None = None
        self.profile: Profile | None = None
        self.cluster: Cluster | None = None
        self.prices = Prices()
        self.cache_slots = 0  # that the plan in force was made for
        self.loaded: dict[str, Any] | None = None
        self.total_epochs = 0
        self.layout: Layout | None = None
        self.plan_epoch = 0
        self.consistent = True
        self.current_pass: PassCounter | None = None
        self.batch_in_hand: int | None = None  # that the user's loop is at
        self.step_buffers = StepBuffers(recipe.model, lambda: self.state.step)
        self._caches: dict[str, ActivationCache | None] = {}
        self._warned: set[str] = set()

    def build_group(
        self,
        name: str,
        members: Sequence[int],
        given_up: Callable[[], bool] | None = None,
    ) -> ActiveGroup:
        """Connect a new group, see `autodp.build_group`."""
        return build_group(
            self.plane,
            name=name,
            members=members,
            config=self.config.autodp,
            given_up=given_up,
        )

    @property
    def is_lead(self) -> bool:
        """True on the first active rank; on rank 0 before the first plan."""
        first = self.layout.active[0] if self.layout is not None else 0
        return self.info.rank == first

    @property
    def num_slots(self) -> int:
        """Devices of this node that pipelines may use."""
        alone = self.info.world_size == 1
        return self.config.pipe.num_slots if alone else self.info.local_world_size

    @property
    def threads_per_stage(self) -> int:
        """Intra-op threads of each CPU slot."""
        wanted = self.config.pipe.threads_per_stage
        return wanted or max(1, (os.cpu_count() or 1) // self.num_slots)

    def build_optimizer(self) -> None:
        """Build optimizer and scheduler when the rank first becomes active.

        The step is counted by the optimizer itself, so a user's own loop counts too.
        """
        recipe = self.recipe
        if self.state.optimizer is not None:
            return
        self.state.build_optimizer(
            list(recipe.parameters), recipe.optimizer, recipe.lr_scheduler
        )
        optimizer = self.state.optimizer
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, *_: object) -> None:
        # A checkpoint must not catch weights in the middle of a step.
        self.consistent = False

    def _after_step(self, *_: object) -> None:
        self.state.step += 1
        # Batches without a step of their own are done with the step that follows.
        at = self.batch_in_hand
        self.state.batch = at + 1 if at is not None else self.state.batch + 1
        self.consistent = True

    def restore_optimizer(self) -> None:
        """Load the optimizer state of a checkpoint, once the optimizer is built."""
        if self.loaded is not None:
            load_optimizer_state(self.loaded, self.state)
            self.loaded = None

    def will_read_again(self) -> bool:
        """Tell whether a later pass will read what this pass would cache."""
        return self.state.epoch + 1 < self.total_epochs

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse after a failure; turn what a failure breaks into that failure."""
        self.plane.check()
        with self.plane.guard():
            yield

    def cache(self, space: str, num_samples: int) -> ActivationCache | None:
        """Return the slab of an id space if it is open and of that many samples."""
        cache = self._caches.get(space)
        if cache is None or cache.num_samples == num_samples:
            return cache
        if space not in self._warned:
            self._warned.add(space)
            _LOG.warning(
                "set %r has %d samples, its cache %d: not cached; give each set its "
                "own name",
                space,
                num_samples,
                cache.num_samples,
            )
        return None

    def training_cache(self) -> ActivationCache | None:
        """Return the slab of the training set if it is open."""
        workload = self.workload
        return self.cache("train", workload.num_samples) if workload else None

    def cache_bytes(self) -> int:
        """Return what a slab of this node may take."""
        return self.config.cache.budget_bytes or available_bytes() // 4

    def training_slots(self) -> int:
        """Return how many samples the training set's slab on this node holds.

        Before there is one, how many it will hold; 0 when it could not be made.
        """
        if "train" in self._caches:
            made = self._caches["train"]
            return made.num_slots if made is not None else 0
        if self.cluster is None or self.cluster.cache is None or self.workload is None:
            return 0
        return slots_within(
            self.cluster.cache.host_bytes,
            num_samples=self.workload.num_samples,
            slot_bytes=self._slot_bytes(),
        )

    def open_cache(
        self, space: str, num_samples: int, layout: Layout | None = None
    ) -> None:
        """Make or attach the node's slab of an id space, once.

        The node's first active rank makes the slab and publishes its address; the
        others attach to it.

        Args:
            space: "train", or the name of an evaluation set.
            num_samples: Ids run from 0 to `num_samples` - 1.
            layout: The active ranks; by default those of the plan in force.
        """
        layout = layout or self.layout
        if not self.config.cache.enabled or space in self._caches:
            return
        if layout is None:
            raise RuntimeError("cache asked for before a plan; please report")
        creator = layout.node_share(self.info.rank)[1] == 0
        key = f"slab/{self.info.node}/{space}"
        made: ActivationCache | None
        if creator:
            made = self._create(num_samples)
            self.plane.publish(key, made.address if made is not None else b"")
        else:
            address = self.plane.wait(key, phase=f"attaching the {space} cache")
            made = self._attach(address, num_samples)
        self._caches[space] = made

    def make_training_cache(self, layout: Layout, boundary: int) -> None:
        """Make this node's slab for a plan to come, if that falls to this rank."""
        workload = self.workload
        if workload is None or not self.config.cache.enabled:
            return
        frozen = list(self.recipe.model)[:boundary]
        if layout.node_share(self.info.rank)[1] or cacheable(frozen, frozen=False):
            return
        self.open_cache("train", workload.num_samples, layout)

    def _create(self, num_samples: int) -> ActivationCache | None:
        try:
            return ActivationCache.create(
                run_id=self.info.run_id,
                num_samples=num_samples,
                slot_bytes=self._slot_bytes(),
                budget_bytes=self.cache_bytes(),
            )
        except (OSError, ValueError) as error:
            _LOG.warning("no cache, frozen layers are recomputed: %s", error)
            return None

    def _slot_bytes(self) -> int:
        if self.profile is None:
            raise RuntimeError("cache asked for before the profile; please report")
        widest = max(p.boundary_bytes_per_sample for p in self.profile.layers)
        record = torch.empty(1, widest + _LAYOUT_SLACK_BYTES, dtype=torch.uint8)
        return record_bytes([record])

    def _attach(self, address: bytes, num_samples: int) -> ActivationCache | None:
        if not address:
            return None
        try:
            return ActivationCache.attach(address, run_id=self.info.run_id)
        except ValueError as error:
            # Another pid namespace or user: an own slab is slower, never wrong.
            _LOG.warning("own cache instead of the node's: %s", error)
            return self._create(num_samples)

    def is_finite(self) -> bool:
        """Tell whether no weight is NaN or Inf: only such weights are worth saving."""
        return all(bool(p.isfinite().all()) for p in self.recipe.model.parameters())

    def close(self) -> None:
        """Release the slabs and give the model back as the user built it."""
        for cache in self._caches.values():
            if cache is not None:
                cache.close()
        self._caches.clear()
        self.freezer.apply(0)
