"""Membership of the run: control plane, active groups, change of plans."""

from pipetransformer.autodp.config import AutoDPConfig
from pipetransformer.autodp.connecting import Unreachable
from pipetransformer.autodp.failure import PeerFailure
from pipetransformer.autodp.group import ActiveGroup, build_group
from pipetransformer.autodp.group_cache import GroupCache, MissingKeptGroup
from pipetransformer.autodp.launch import LaunchInfo, connect
from pipetransformer.autodp.plane import ControlPlane
from pipetransformer.autodp.protocol import PlanAgreement, announced_epoch
from pipetransformer.autodp.same_call import gather_at
from pipetransformer.autodp.transfer import (
    broadcast_tensors,
    compare_hashes,
    hash_tensors,
)

__all__ = [
    "ActiveGroup",
    "AutoDPConfig",
    "GroupCache",
    "LaunchInfo",
    "ControlPlane",
    "MissingKeptGroup",
    "PeerFailure",
    "PlanAgreement",
    "Unreachable",
    "announced_epoch",
    "broadcast_tensors",
    "build_group",
    "compare_hashes",
    "connect",
    "gather_at",
    "hash_tensors",
]
