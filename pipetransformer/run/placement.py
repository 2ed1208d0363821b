"""Brings the layers to the devices that a plan gives them, and hands devices over."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta

import torch
from torch import Tensor, nn

from pipetransformer.autodp import ControlPlane
from pipetransformer.core.devices import (
    HOST,
    empty_caches,
    move_modules,
    move_moments,
)
from pipetransformer.planner import Plan, Profile, prefix_cuts
from pipetransformer.run.slots import Slots
from pipetransformer.state.state import TrainingState

_LOG = logging.getLogger(__name__)


class Placement:
    """Where the layers of this process are, and what belongs to them.

    Each stage's layers are on its device, with what the optimizer holds for them. The
    frozen ones are on the first stage's, in chunks on all of them where the plan has
    them pipelined, or on the host as long as all that they give is cached, and what the
    optimizer holds for them on the host, where all layers are while this process drives
    no replica. The first stage's device is the thread's
    current one. Nothing is done where slots are the host's.

    Args:
        slots: Of the node.
        plane: Tells other ranks which devices are free.
        state: Holds model, optimizer and sums of gradients.
        loss: Of the user; a module is kept with the last layers.
        timeout: Longest wait for a device.
    """

    def __init__(
        self,
        slots: Slots,
        plane: ControlPlane,
        state: TrainingState,
        loss: object,
        timeout: timedelta,
    ) -> None:
        self._slots = slots
        self._plane = plane
        self._state = state
        self._losses = [loss] if isinstance(loss, nn.Module) else []
        self._timeout = timeout
        self._moments: dict[nn.Parameter, torch.device] = {}
        self._before: int | None = None  # the thread's device, of the script's own
        self._told: list[str] = []  # what it has published, to be deleted

    def devices(self, plan: Plan) -> tuple[torch.device, ...]:
        """Return the devices of this process's stages under a plan."""
        return self._slots.of(self._slots.block(plan.num_stages))

    def frozen(self, plan: Plan, profile: Profile | None) -> list[torch.device]:
        """Return the device of each frozen layer under a plan.

        Args:
            plan: Under which this process drives a replica.
            profile: Of the layers, which decides how they are cut into chunks.
        """
        devices = self.devices(plan)
        if plan.prefix != "pipelined" or profile is None:
            return [devices[0]] * plan.boundary
        cuts = prefix_cuts(profile, plan)
        sizes = [end - begin for begin, end in zip(cuts, cuts[1:], strict=False)]
        return [d for d, size in zip(devices, sizes, strict=False) for _ in range(size)]

    def in_use(self) -> tuple[torch.device, ...]:
        """Return the accelerators that layers are on, in their order."""
        return tuple(d for d in dict.fromkeys(self._present()) if d != HOST)

    def release(self, plan: Plan | None, plan_epoch: int) -> None:
        """Leave devices that this process does not keep, and say so.

        Args:
            plan: Under which it drives a replica; None: it drives none.
            plan_epoch: Number of the change of plan.
        """
        if self._slots.on_host:
            return
        kept = set(self.devices(plan)) if plan is not None else set()
        self._bring([d if d in kept else HOST for d in self._present()])
        self._plane.delete_later(*self._told)
        self._told = [_key(plan_epoch, self._plane.rank)]
        self._plane.publish(self._told[0], b"free")

    def take(
        self,
        plan: Plan,
        frozen: Sequence[torch.device],
        plan_epoch: int,
        absent: Collection[int] = (),
    ) -> None:
        """Bring the layers to their stages, once others have left the devices.

        Args:
            plan: Under which this process drives a replica.
            frozen: The device of each frozen layer.
            plan_epoch: Number of the change of plan.
            absent: Ranks that have no part in it.

        Raises:
            PeerFailure: another rank failed, or did not leave in time.
        """
        if self._slots.on_host:
            return
        rank, members = self._plane.rank, set(self._plane.members) - set(absent)
        first = rank - self._slots.own  # of this node
        devices = self.devices(plan)
        others = [
            first + slot
            for slot, device in enumerate(self._slots.devices)
            if device in devices and first + slot in members - {rank}
        ]
        for other in others:
            self._plane.wait(
                _key(plan_epoch, other),
                phase="hand-over of devices",
                timeout=self._timeout,
            )
        if self._before is None:
            self._before = torch.accelerator.current_device_index()
        # What names no device of its own, as pinned memory, would else have all
        # processes make a context on the first one.
        torch.accelerator.set_device_index(devices[0].index)
        places = list(frozen)
        for device, begin, end in zip(
            devices, plan.cuts[:-1], plan.cuts[1:], strict=True
        ):
            places += [device] * (end - begin)
        self._bring(places, boundary=plan.boundary)
        move_modules(self._losses, devices[-1])

    def place_frozen(self, places: Sequence[torch.device]) -> None:
        """Move the frozen layers alone, as while nothing needs them; the rest stays.

        Args:
            places: Where to, each; they share nothing with the others.
        """
        left = set(self._present()[: len(places)]) - set(places)
        self._move(places)
        empty_caches(left)

    def _move(self, places: Sequence[torch.device]) -> None:
        layers = list(self._state.model)[: len(places)]
        for device in dict.fromkeys(places):
            here = [x for x, d in zip(layers, places, strict=True) if d == device]
            move_modules(here, device)

    def settle_moments(self) -> None:
        """Bring what the optimizer holds to its place, after it was loaded."""
        optimizer, places = self._state.optimizer, self._moments
        if optimizer is not None and places:
            move_moments(optimizer, lambda p: places.get(p, p.device))

    def close(self) -> None:
        """Bring everything back to the host, if that can be done."""
        if self._slots.on_host:
            return
        try:
            self._bring([HOST] * len(self._state.model))
            if self._before is not None:
                torch.accelerator.set_device_index(self._before)
        except RuntimeError as error:  # after an error that a device does not survive
            _LOG.error("model: could not be brought back to the host: %s", error)

    def _present(self) -> list[torch.device]:
        """Return where each layer is now; one without tensors is on the host."""
        tensors = (next(_tensors_of(layer), None) for layer in self._state.model)
        return [HOST if each is None else each.device for each in tensors]

    def _bring(self, places: Sequence[torch.device], boundary: int = 0) -> None:
        layers = list(self._state.model)
        given_up = set(self._present()) - set(places)
        self._move(places)
        self._moments = {
            parameter: place if index >= boundary else HOST
            for index, (layer, place) in enumerate(zip(layers, places, strict=True))
            for parameter in layer.parameters()
        }
        self.settle_moments()
        if self._state.gradients is not None:
            self._state.gradients.follow()
        if set(places) <= {HOST}:
            move_modules(self._losses, HOST)
        empty_caches(given_up)


def _key(plan_epoch: int, rank: int) -> str:
    return f"released/{plan_epoch}/{rank}"


def _tensors_of(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()
