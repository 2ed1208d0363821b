"""What ran when, in a simulated step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """One operation of a simulated step.

    Args:
        kind: ``F`` forward, ``R`` forward again, ``B`` backward, ``I`` and ``W`` its
            halves (gradients of inputs, of weights), ``P`` forward of the frozen
            layers, ``C`` copy between devices, ``A`` all-reduce, ``H`` read from the
            cache, ``O`` optimizer.
        resource: ``"compute"`` of the stage's device, ``"copy engine"`` into it,
            ``"device link"`` to other replicas in the node, ``"network"`` or
            ``"cache"``.
        stage: whose device it runs on; of a copy, where it arrives.
        microbatch: which one; None: it belongs to the whole step.
        direction: of a copy: ``">"`` to a later stage, ``"<"`` to an earlier one;
            else empty.
        begin_ns: since the start of the step, ns.
        end_ns: since the start of the step, ns.
    """

    kind: str
    resource: str
    stage: int
    microbatch: int | None
    direction: str
    begin_ns: int
    end_ns: int

    @property
    def name(self) -> str:
        """Kind and micro-batch, such as ``F3``; of the whole step: ``A``."""
        return self.kind + ("" if self.microbatch is None else str(self.microbatch))
