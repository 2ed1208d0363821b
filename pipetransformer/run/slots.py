"""The devices of a node's slots: which of them a replica's stages are on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from pipetransformer.autodp import ControlPlane, LaunchInfo
from pipetransformer.config import Config
from pipetransformer.core.devices import HOST, identity


@dataclasses.dataclass(frozen=True)
class Slots:
    """A node's slots, each with a device; several may have the same.

    A replica with K stages takes the block of K slots that its rank is in, one for
    each stage.

    Attributes:
        devices: Of each slot, as this process names them, of one type.
        own: The slot of this process.
    """

    devices: tuple[torch.device, ...]
    own: int = 0

    @property
    def type(self) -> str:
        """The type of all devices; ``"cpu"`` for slots of the host."""
        return self.devices[0].type

    @property
    def on_host(self) -> bool:
        """Whether stages compute on the host."""
        return self.devices[0] == HOST

    def block(self, num_stages: int, slot: int | None = None) -> range:
        """Return the slots of the replica that the process of a slot drives.

        Args:
            num_stages: K of the plan.
            slot: Of the process; None: this one's.
        """
        number = (self.own if slot is None else slot) // num_stages
        return range(number * num_stages, (number + 1) * num_stages)

    def of(self, slots: Sequence[int]) -> tuple[torch.device, ...]:
        """Return the devices of some slots."""
        return tuple(self.devices[slot] for slot in slots)

    def shares(self, num_stages: int) -> bool:
        """Tell whether replicas with that many stages would share a device."""
        blocks = [
            set(self.of(self.block(num_stages, first)))
            for first in range(0, len(self.devices) - num_stages + 1, num_stages)
        ]
        return sum(map(len, blocks)) > len(set().union(*blocks))

    def per_device(self) -> int:
        """Return how many slots the device that serves most has."""
        return max(map(self.devices.count, self.devices))


def slots_of(config: Config, info: LaunchInfo) -> Slots:
    """Return the slots of this process's node.

    Raises:
        ValueError: `Config.devices` names devices that cannot be used so.
    """
    alone = info.world_size == 1
    named = _named(config)
    if named[0] == HOST:
        count = config.pipe.num_slots if alone else info.local_world_size
    else:
        count = len(named) if alone else info.local_world_size
    dealt = tuple(named[slot % len(named)] for slot in range(count))
    slots = Slots(dealt, 0 if alone else info.local_rank)
    if slots.on_host and config.plan.prefix == "pipelined":
        raise ValueError(
            "PlanConfig.prefix: expected 'auto', 'replicated' or 'filled' for slots of "
            "a host, which have the frozen layers in common, got 'pipelined'"
        )
    if not slots.on_host and config.plan.prefix == "filled":
        raise ValueError(
            "PlanConfig.prefix: expected 'auto', 'replicated' or 'pipelined' for "
            "accelerators, where bubbles stay, got 'filled'"
        )
    _check_blocks(slots)
    return slots


def _named(config: Config) -> list[torch.device]:
    if config.devices is None:
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", index) for index in range(seen)] or [HOST]
    what, found = "Config.devices", []
    for name in config.devices:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(
                f"{what}: expected names of devices, got {name!r}"
            ) from error
        found.append(_indexed(device, name))
    kinds = sorted({device.type for device in found})
    if len(kinds) > 1:
        raise ValueError(f"{what}: expected devices of one type, got {kinds}")
    return found


def _indexed(device: torch.device, name: str) -> torch.device:
    if device.type == "cpu":
        return HOST
    there, count = False, 0
    if device.type != "meta":
        module = torch.get_device_module(device)
        there = bool(module.is_available())
        count = int(module.device_count()) if there else 0
    index = device.index or 0
    if index >= count:
        raise ValueError(
            f"Config.devices: expected devices that this process sees, {count} of type "
            f"{device.type}, got {name!r}"
        )
    return torch.device(device.type, index)


def _check_blocks(slots: Slots) -> None:
    """Refuse devices by which replicas would cut their layers in different ways."""
    count = len(slots.devices)
    for stages in range(1, count + 1):
        forms = set()
        for first in range(0, count - stages + 1, stages):
            block = slots.of(slots.block(stages, first))
            forms.add(tuple(block.index(device) for device in block))
        if len(forms) > 1:
            raise ValueError(
                "Config.devices: expected blocks of as many slots to share devices in "
                f"the same way, got {[str(device) for device in slots.devices]}, which "
                f"{stages} stages would not"
            )


def compare_devices(plane: ControlPlane, slots: Slots) -> None:
    """Refuse processes of a node that see other devices; collective.

    Raises:
        ValueError: on every rank, naming the first rank that does.
    """
    if slots.on_host or plane.world_size == 1:
        return
    names = "; ".join(map(identity, slots.devices))
    mine = f"{plane.info.node} {names}".encode()
    told = [part.decode() for part in plane.gather("devices", mine, phase="devices")]
    first: dict[str, tuple[int, str]] = {}
    for rank, text in zip(plane.members, told, strict=True):
        node, _, seen = text.partition(" ")
        other, expected = first.setdefault(node, (rank, seen))
        if seen != expected:
            plane.finish()  # every rank refuses: leave together
            raise ValueError(
                f"devices of rank {rank}: expected those that rank {other} of its "
                f"node sees, {expected}, got {seen}; a replica drives the devices of "
                "several processes, so none of them must hide devices from another, "
                "as CUDA_VISIBLE_DEVICES of its own would"
            )
