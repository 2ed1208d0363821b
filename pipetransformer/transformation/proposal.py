"""The plan message of PREPARE: everything a rank needs to take its new place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pipetransformer._extension import hash_bytes
from pipetransformer.autocache import Admission
from pipetransformer.planner import Plan
from pipetransformer.run.layout import Layout

_VERSION = 4

SWITCH = ("progress", "policy", "pauses", "operations", "position")
"""What of a plan that is prepared ahead is known only where it takes effect."""


def group_name(plan_epoch: int) -> str:
    """Return the name of the group that is built for a plan."""
    return f"g/{plan_epoch}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan with its place in time, as text without pickle.

    Attributes:
        plan_epoch: Counter of plans, never the training epoch.
        plan: The new plan.
        layout: Which ranks are active under it.
        progress: Counters of the training state at the agreed step boundary.
        policy: State of the freeze policy.
        frozen_units: Units frozen under the plan.
        seed: Seed of the run.
        reason: Why the plan changes, for people.
        pauses: What changes of plan have taken, as plain values.
        cache_slots: Samples that the lead's slab holds at the plan's boundary; 0 where
            its frozen layers run for every batch.
        admission: Why they do, or do not; None: it was not compared.
        source: The member whose state is everybody's.
        receivers: The members that take the state over from it.
        absent: Ranks that are left out because they missed or refused an earlier
            attempt; they learn the outcome, and nobody waits for them.
        operations: Operations that the active ranks have completed.
        position: The next batch where the plan changes within a pass; else None.
        group: Name of the members' group: a kept one's, or `fresh_group`.
        ahead: The plan is prepared while training goes on. The lead says later where
            it takes effect, and what `progress`, `policy`, `pauses`, `operations` and
            `position` are there; see `at_switch`.
    """

    plan_epoch: int
    plan: Plan
    layout: Layout
    progress: Mapping[str, int]
    policy: Mapping[str, Any]
    frozen_units: int
    seed: int
    reason: str
    pauses: Mapping[str, Any]
    cache_slots: int
    admission: Admission | None = None
    source: int = 0
    receivers: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    operations: int = 0
    position: int | None = None
    group: str = ""
    ahead: bool = False

    @property
    def fresh_group(self) -> str:
        """The name that a new group has under this plan."""
        return group_name(self.plan_epoch)

    @property
    def caches(self) -> bool:
        """False where frozen layers run for every batch because that is cheaper."""
        return self.admission is None or self.admission.caches

    def at_switch(self, message: Mapping[str, Any]) -> Proposal:
        """Return the plan with its place in time, once that is known.

        Args:
            message: Holds the fields of `SWITCH`; others are ignored.
        """
        return dataclasses.replace(self, **{name: message[name] for name in SWITCH})

    def to_bytes(self) -> bytes:
        """Serialise as JSON followed by the hash of the JSON text."""
        content = {
            "version": _VERSION,
            "plan_epoch": self.plan_epoch,
            "plan": self.plan.to_json(),
            "active": list(self.layout.active),
            "nodes": list(self.layout.nodes),
            "progress": dict(self.progress),
            "policy": dict(self.policy),
            "frozen_units": self.frozen_units,
            "seed": self.seed,
            "reason": self.reason,
            "pauses": dict(self.pauses),
            "cache_slots": self.cache_slots,
            "admission": self.admission and self.admission.to_dict(),
            "source": self.source,
            "receivers": list(self.receivers),
            "absent": list(self.absent),
            "operations": self.operations,
            "position": self.position,
            "group": self.group,
            "ahead": self.ahead,
        }
        text = json.dumps(content, sort_keys=True).encode()
        return text + f"#{hash_bytes(text):016x}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Proposal:
        """Read a message of `to_bytes`.

        Raises:
            RuntimeError: the bytes do not match their hash or are of another version.
        """
        text, _, digest = data.rpartition(b"#")
        if digest != f"{hash_bytes(text):016x}".encode():
            raise RuntimeError("plan message: expected its own hash, got another one")
        content = json.loads(text)
        if content["version"] != _VERSION:
            raise RuntimeError(
                f"plan message: expected version {_VERSION}, got {content['version']}"
            )
        admission = content["admission"]
        return cls(
            plan_epoch=content["plan_epoch"],
            plan=Plan.from_json(content["plan"]),
            layout=Layout(
                active=tuple(content["active"]), nodes=tuple(content["nodes"])
            ),
            progress=content["progress"],
            policy=content["policy"],
            frozen_units=content["frozen_units"],
            seed=content["seed"],
            reason=content["reason"],
            pauses=content["pauses"],
            cache_slots=content["cache_slots"],
            admission=admission and Admission.from_dict(admission),
            source=content["source"],
            receivers=tuple(content["receivers"]),
            absent=tuple(content["absent"]),
            operations=content["operations"],
            position=content["position"],
            group=content["group"],
            ahead=content["ahead"],
        )
