"""What a codec of the activation cache does to training, measured before its use."""

from __future__ import annotations

import dataclasses
from typing import Any

from pipetransformer.core.wire import (
    Fields,
    check_bool,
    check_float,
    check_int,
    check_str,
)

LEAST_COSINE = 0.999  # of gradients with and without the codec


@dataclasses.dataclass(frozen=True)
class CodecRecord:
    """One decision on a codec, for the records of one boundary and one rank.

    Attributes:
        epoch: The training epoch that it fell into.
        step: Optimizer steps done before it.
        boundary: Index of the first active layer.
        codec: ``"bf16"``, ``"fp16"`` or ``"int8"``.
        passed: Records are kept in it; else as they are.
        samples: Measured samples.
        cosine: Between the gradients of the active layers with the activations as they
            are and as they would be read; None: not measured.
        output_error: Norm of the difference of the outputs over the outputs'; None: not
            measured.
        reason: Why it could not be measured; empty if it could.
    """

    epoch: int
    step: int
    boundary: int
    codec: str
    passed: bool
    samples: int
    cosine: float | None = None
    output_error: float | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the record in the summary's format."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: object, what: str) -> CodecRecord:
        """Read what `to_json` gave; `what` is its name in errors.

        Raises:
            ValueError: a missing or wrong field (named).
        """
        fields = Fields(value, what)
        return cls(
            epoch=fields.read("epoch", check_int),
            step=fields.read("step", check_int),
            boundary=fields.read("boundary", check_int),
            codec=fields.read("codec", check_str),
            passed=fields.read("passed", check_bool),
            samples=fields.read("samples", check_int),
            cosine=fields.read_or_none("cosine", check_float),
            output_error=fields.read_or_none("output_error", check_float),
            reason=fields.read("reason", check_str),
        )

    def __str__(self) -> str:
        """Return one line: what was measured, and what follows."""
        use = "in use" if self.passed else "not used, records are kept as they are"
        found = self.reason
        if self.cosine is not None and self.output_error is not None:
            relation = ">=" if self.cosine >= LEAST_COSINE else "<"
            found = (
                f"gradient cosine {self.cosine:.5f} ({relation} {LEAST_COSINE}), "
                f"outputs differ by {100 * self.output_error:.2g} % on "
                f"{self.samples} samples"
            )
        return f"codec {self.codec} at boundary {self.boundary}: {found}: {use}"
