"""The node's slabs of cached activations, as one run opens them."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Sequence

import torch

from pipetransformer._extension import host_memory
from pipetransformer.autocache import (
    ActivationCache,
    CacheFolder,
    Codec,
    bytes_on_disk,
    cacheable,
    fingerprint_chain,
    record_bytes,
    slots_within,
    usual_bytes,
)
from pipetransformer.autodp import ControlPlane, PeerFailure
from pipetransformer.run.arguments import EngineArguments
from pipetransformer.run.layout import Layout
from pipetransformer.run.plan_inputs import PlanInputs

_LOG = logging.getLogger(__name__)
_LAYOUT_SLACK_BYTES = 256  # alignment of the tensors of a record that has several


@dataclasses.dataclass(frozen=True)
class Room:
    """Of how many samples a node's cache holds all records.

    Attributes:
        in_memory: In its slab.
        on_disk: Of those that the slab has no room for.
    """

    in_memory: int = 0
    on_disk: int = 0

    @property
    def samples(self) -> int:
        """Of both."""
        return self.in_memory + self.on_disk


class Caches:
    """The slabs of a run, one per id space.

    Args:
        arguments: What the user asked for.
        plane: The control plane, open.
        inputs: How many samples there are, and how large a record is.
    """

    def __init__(
        self, arguments: EngineArguments, plane: ControlPlane, inputs: PlanInputs
    ) -> None:
        self._arguments = arguments
        self._config = arguments.config.cache
        self._plane = plane
        self._info = plane.info
        self._inputs = inputs
        self._caches: dict[str, ActivationCache | None] = {}
        self._folder = None
        if self._config.enabled and self._config.directory is not None:
            self._folder = CacheFolder(self._config.directory, self._info.node)
        self._kept: dict[str, int] = {}  # of spaces that this rank keeps: first layer
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Make the folder that records are kept in; say what one view means.

        Raises:
            ValueError: nothing can be written there.
        """
        if self._folder is not None:
            self._folder.make()
        if self._config.views == 1 and self._info.rank == 0:
            _LOG.warning(
                "CacheConfig.views=1: each sample keeps the augmentation of its first "
                "epoch, so a model sees no more different inputs than without "
                "augmentation, and may generalise worse; more views take more memory "
                "and keep some of it"
            )

    def close(self) -> None:
        """Keep what is to be kept, and release the slabs."""
        for space, layers in self._kept.items():
            cache = self._caches.get(space)  # None, too: it could not be told of
            if cache is not None:
                cache.heed_others()
            if cache and not cache.given_up and self._folder is not None:
                self._folder.save(cache, self._kept_as(space), layers)
        if self._folder is not None:
            self._folder.settle()  # of caches that were given up, too
        self._kept.clear()
        for cache in self._caches.values():
            if cache is not None:
                cache.close()
        self._caches.clear()

    def of(self, space: str, num_samples: int) -> ActivationCache | None:
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

    def training(self) -> ActivationCache | None:
        """Return the slab of the training set if it is open."""
        workload = self._inputs.workload
        return self.of("train", workload.num_samples) if workload else None

    def begin_pass(self, space: str) -> None:
        """Note that a pass over a set begins; keep what the pass before it stored."""
        cache = self._caches.get(space)
        if cache is None:
            return
        cache.begin_pass()
        kept = space in self._kept and not cache.given_up
        if kept and self._folder is not None:
            self._folder.save_soon(cache, self._kept_as(space), self._kept[space])

    def _views(self, space: str) -> int:
        """Return how many versions of each sample there are."""
        return self._config.views or 1 if space == "train" else 1

    def _kept_as(self, space: str) -> str:
        """Return the name of a space in files: other views have other ids."""
        views = self._views(space)
        return space if views == 1 else f"{space} in {views} views"

    def budget_bytes(self) -> int:
        """Return what a slab of this node may take."""
        return self._config.budget_bytes or host_memory().available_bytes // 4

    def disk_bytes(self) -> int:
        """Return what a slab of this node may take on disk besides; 0: nothing."""
        folder = self._config.disk_directory
        if not self._config.enabled or folder is None:
            return 0
        try:
            free = shutil.disk_usage(folder).free // 2
        except OSError:
            return 0  # nor will there be a file, which says why
        return self._config.disk_bytes or free

    def prefetch(self, space: str, samples: Sequence[int], view: int = 0) -> None:
        """Start to read what is on disk of samples that will be asked for in a view."""
        cache = self._caches.get(space)
        if cache is not None and cache.has_disk and not cache.given_up:
            cache.prefetch(samples, view)

    def reads_disk(self, space: str) -> bool:
        """Tell whether `prefetch` is of use."""
        cache = self._caches.get(space)
        return cache is not None and cache.has_disk

    def training_room(self) -> Room:
        """Return of how many samples this node's cache holds all training records.

        Before there is one, how many it will hold; none when it could not be made.
        """
        views = self._views("train")

        def room(num_samples: int, slots: int, on_disk: int) -> Room:
            in_memory = min(num_samples, slots // views)
            both = min(num_samples, (slots + on_disk) // views)
            return Room(in_memory, both - in_memory)

        if "train" in self._caches:
            made = self._caches["train"]
            if made is None or made.given_up:
                return Room()
            return room(made.num_samples, made.num_slots, made.disk_records)
        cluster, workload = self._inputs.cluster, self._inputs.workload
        if cluster is None or cluster.cache is None or workload is None:
            return Room()
        slot_bytes = self._slot_bytes("train")
        slots = slots_within(
            cluster.cache.host_bytes,
            num_samples=workload.num_samples * views,
            slot_bytes=slot_bytes,
        )
        if slots == 0:
            return Room()
        on_disk = cluster.cache.disk_bytes // bytes_on_disk(slot_bytes)
        return room(workload.num_samples, slots, on_disk)

    def obtain(self, space: str, num_samples: int, layout: Layout | None) -> None:
        """Make or attach the node's slab of an id space, once.

        The node's first active rank makes the slab and publishes its address; the
        others attach to it.

        Args:
            space: "train", or the name of an evaluation set.
            num_samples: Ids run from 0 to `num_samples` - 1.
            layout: The active ranks of the plan.
        """
        if not self._config.enabled or space in self._caches:
            return
        if layout is None:
            raise RuntimeError("cache asked for before a plan; please report")
        creator = layout.node_share(self._info.rank)[1] == 0
        try:
            self._caches[space] = self._share(space, num_samples, creator=creator)
        except PeerFailure:
            if self._plane.failure is not None or not self._plane.store_lost:
                raise
            _LOG.warning("no cache for %r, since the store is lost", space)
            self._caches[space] = None

    def _share(
        self, space: str, num_samples: int, *, creator: bool
    ) -> ActivationCache | None:
        key = f"slab/{self._info.node}/{space}"
        if not creator:
            address = self._plane.wait(key, phase=f"attaching the {space} cache")
            cache = self._attach(address, space, num_samples)
            if cache is not None and self._folder is not None:
                cache.expect_earlier_records()
            return cache
        made = self._create(space, num_samples)
        if made is not None and self._folder is not None:
            layers = fingerprint_chain(list(self._arguments.model), 1)[1]
            self._folder.load(made, self._kept_as(space), layers)
            self._kept[space] = layers
        self._plane.publish(key, made.address if made is not None else b"")
        return made

    def make_training(self, layout: Layout, boundary: int) -> None:
        """Make this node's slab for a plan to come, if that falls to this rank."""
        workload = self._inputs.workload
        if workload is None or not self._config.enabled:
            return
        if self._folder is not None:
            return  # files go by the first layer's weights, which train until then
        frozen = list(self._arguments.model)[:boundary]
        if layout.node_share(self._info.rank)[1] or cacheable(frozen, frozen=False):
            return
        self.obtain("train", workload.num_samples, layout)

    def _codec(self, space: str) -> Codec:
        """Return how records are kept: those of evaluations give the same bits."""
        return self._config.codec if space == "train" else "native"

    def _is_ragged(self, space: str) -> bool:
        """Tell whether records differ in size; native ones take more than others."""
        return self._arguments.ragged is not None or self._codec(space) != "native"

    def _create(self, space: str, num_samples: int) -> ActivationCache | None:
        slot_bytes = self._slot_bytes(space)
        try:
            cache = ActivationCache.create(
                run_id=self._info.run_id,
                num_samples=num_samples,
                slot_bytes=slot_bytes,
                budget_bytes=self.budget_bytes(),
                ragged=self._is_ragged(space),
                verify="all" if self._config.debug else self._config.verify,
                audit_every=self._config.audit_every,
                views=self._views(space),
            )
        except (OSError, RuntimeError, ValueError) as error:
            # RuntimeError: the machine does not tell its memory.
            _LOG.warning("no cache, frozen layers are recomputed: %s", error)
            return None
        folder = self._config.disk_directory
        if folder is not None:
            try:
                cache.add_disk(folder, disk_bytes=self._config.disk_bytes)
                _LOG.info("cache: %s", cache.disk_text)
            except (OSError, ValueError) as error:
                _LOG.warning("cache: nothing is kept on disk: %s", error)
        return cache

    def _slot_bytes(self, space: str) -> int:
        profile = self._inputs.profile
        if profile is None:
            raise RuntimeError("cache asked for before the profile; please report")
        widest = max(
            layer.boundary_bytes_per_sample
            for boundary, layer in enumerate(profile.layers, start=1)
            if profile.may_be_boundary(boundary)
        )
        usual = usual_bytes(widest, self._codec(space)) + _LAYOUT_SLACK_BYTES
        record = torch.empty(1, usual, dtype=torch.uint8)
        return record_bytes([record])

    def _attach(
        self, address: bytes, space: str, num_samples: int
    ) -> ActivationCache | None:
        if not address:
            return None
        try:
            cache = ActivationCache.attach(
                address,
                run_id=self._info.run_id,
                verify="all" if self._config.debug else self._config.verify,
                audit_every=self._config.audit_every,
                views=self._views(space),
            )
            try:
                self._require_room(cache, space, num_samples)
            except ValueError:
                cache.close()
                raise
            return cache
        except ValueError as error:
            # Another pid namespace or user: an own slab is slower, never wrong.
            _LOG.warning("own cache instead of the node's: %s", error)
            return self._create(space, num_samples)

    def _require_room(
        self, cache: ActivationCache, space: str, num_samples: int
    ) -> None:
        """Refuse a slab of another set, or one that holds none of this run's records.

        Plans would count on it, and nothing would be cached.
        """
        # Slots of ragged records are as large as they need to be.
        wanted = 0 if self._is_ragged(space) else self._slot_bytes(space)
        if cache.num_samples != num_samples or cache.slot_bytes < wanted:
            raise ValueError(
                f"the node's cache: expected {num_samples} samples in slots of at "
                f"least {wanted} bytes, got {cache.num_samples} of {cache.slot_bytes}"
            )
