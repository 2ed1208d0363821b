"""Types of the C++ extension; checked by stubtest."""

from collections.abc import Sequence

# core
def hash_bytes(data: bytes, seed: int = ...) -> int: ...

# planner

# autofreeze
def check_alpha(alpha: float) -> None: ...
def alpha_cap_advance(
    *,
    alpha: float,
    num_units: int,
    min_active: int,
    frozen: float,
    num_frozen: int,
    gradient_norms: Sequence[float],
) -> tuple[float, int]: ...

# pipe

# autodp

# autocache
