from collections.abc import Sequence

import torch

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
def add_each(sums: Sequence[torch.Tensor], addends: Sequence[torch.Tensor]) -> None: ...
