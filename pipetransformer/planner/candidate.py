"""What a search compared: one shape, schedule and cuts, with its times."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pipetransformer.core import wire

SCHEDULES = ("gpipe", "1f1b", "zb-h1")
PREFIX_PLACEMENTS = ("none", "replicated", "pipelined", "filled")
CACHE_TIERS = ("none", "device", "host", "disk")
COPY_MODELS = ("overlapped", "serial")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a step that the search compared.

    Args:
        num_stages: K.
        num_replicas: R.
        num_microbatches: M.
        cuts: K + 1 layer indices from the boundary to the number of layers.
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"zb-h1"``.
        prefix: where the frozen layers run: ``"none"`` (there are none),
            ``"replicated"``, ``"pipelined"`` or ``"filled"``.
        cache: tier that the frozen outputs are read from: ``"none"``, ``"device"``,
            ``"host"`` or ``"disk"``.
        predicted_step_ns: the closed form's estimate, which ranks, ns.
        lower_bound_ns: no step with these cuts takes less, ns.
        simulated_step_ns: what decides, ns.
        lost: why it was not chosen; empty for the chosen one.

    Raises:
        ValueError: a field is malformed; the text names it.
    """

    num_stages: int
    num_replicas: int
    num_microbatches: int
    cuts: tuple[int, ...]
    schedule: str = "gpipe"
    prefix: str = "none"
    cache: str = "none"
    predicted_step_ns: int
    lower_bound_ns: int = 0
    simulated_step_ns: int = 0
    lost: str = ""

    def __post_init__(self) -> None:
        """Check every field."""
        what = "candidate"
        for name in ("num_stages", "num_replicas", "num_microbatches"):
            wire.check_int(getattr(self, name), f"{what} {name}", low=1)
        for name in ("predicted_step_ns", "lower_bound_ns", "simulated_step_ns"):
            wire.check_int(getattr(self, name), f"{what} {name}")
        cuts = wire.check_ints(self.cuts, f"{what} cuts")
        object.__setattr__(self, "cuts", cuts)
        wire.check_choice(self.schedule, f"{what} schedule", SCHEDULES)
        wire.check_choice(self.prefix, f"{what} prefix", PREFIX_PLACEMENTS)
        wire.check_choice(self.cache, f"{what} cache", CACHE_TIERS)
        wire.check_str(self.lost, f"{what} lost")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, R, M)."""
        return self.num_stages, self.num_replicas, self.num_microbatches

    @property
    def name(self) -> str:
        """K, R, M, and what is not usual: a schedule or place of frozen layers."""
        return short_name(self.shape, self.schedule, self.prefix)

    def to_dict(self) -> dict[str, object]:
        """Return the candidate as JSON-ready values."""
        return {**vars(self), "cuts": list(self.cuts)}

    @classmethod
    def from_dict(cls, value: object, what: str) -> Candidate:
        """Read a candidate; ``what`` names it in errors."""
        names = [entry.name for entry in fields(cls)]
        found = wire.read_object(value, what, required=names)
        try:
            return cls(**found)  # type: ignore[arg-type]  # checked by __post_init__
        except ValueError as error:
            text = str(error).removeprefix("candidate ")
            raise ValueError(f"{what} {text}") from None


def short_name(shape: tuple[int, int, int], schedule: str, prefix: str) -> str:
    """Return K, R, M, and what is not usual: a schedule or place of frozen layers."""
    k, r, m = shape
    order = "" if schedule == "gpipe" else f" {schedule}"
    return f"K={k} R={r} M={m}{order}{place_name(prefix)}"


def place_name(prefix: str) -> str:
    """Return the place of frozen layers, where it is not usual, behind a space."""
    return f" prefix {prefix}" if prefix in ("pipelined", "filled") else ""
