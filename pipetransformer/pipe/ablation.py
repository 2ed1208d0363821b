"""Parts of the pipeline that `testing.ablation` switches off."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Ablation:
    """Which rules are in force; all of them, unless one measures their effect.

    Gradients do not depend on them.

    Args:
        order_rule: A stage runs at most one micro-batch ahead of its successor, and
            recomputes one micro-batch at a time.
        early_recompute: A recomputation starts before the gradient of the next stage
            arrives.
        copy_streams: Copies between devices run on streams of their own.

    Source: torchgpipe (Kim et al., 2020), the ablation of its U-Net timeline.
    """

    order_rule: bool = True
    early_recompute: bool = True
    copy_streams: bool = True
