"""Figures of others that stand alongside ours.

Source: the models: the benchmarks of torchgpipe 0.0.7 on 4 or 8 Tesla P40 with PyTorch
1.3.0, and GPipe's table 2. They compare different batch sizes; ours compare equal ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TimelineEntry:
    """One line of the U-Net ablation."""

    samples_per_s: float
    speedup: float
    gpu_use_percent: int
    memory_gib: float


# Checkpoint mode -> microseconds per cell above a plain loop, forward and backward, of
# torch.distributed.pipeline.sync as torch 2.3 had it last (4 tiny stages, 32
# micro-batches). Taken on another machine, by a script that is not kept: a size to
# compare with, no ratio. `pipe_overhead.py --pipe` puts another pipeline next to ours.
OVERHEAD_US = {"never": (100, 26), "except_last": (157, 181)}

# Depth 5, 5 convolutions per level, 64 channels, 192 x 192 x 3, batch 128, 8
# micro-batches, 4 GPUs.
UNET_TIMELINE = (
    TimelineEntry(30.662, 1.0, 44, 52.2),
    TimelineEntry(41.306, 1.347, 59, 19.1),
    TimelineEntry(55.191, 1.800, 71, 30.0),
    TimelineEntry(58.477, 1.907, 75, 23.5),
)

# Model -> (stages, micro-batches) -> speed-up, and GPipe's own. AmoebaNet-D (18, 256)
# over two stages with one micro-batch; ResNet-101 over the plain model (stages 0).
MODEL_SPEEDUPS: dict[str, dict[tuple[int, int], tuple[float, float]]] = {
    "amoebanet": {
        (2, 1): (1.0, 1.0),
        (2, 4): (1.539, 1.07),
        (2, 32): (1.773, 1.21),
        (4, 1): (1.004, 1.13),
        (4, 4): (1.666, 1.26),
        (4, 32): (2.709, 1.84),
        (8, 1): (0.932, 1.38),
        (8, 4): (2.621, 1.72),
        (8, 32): (4.953, 3.48),
    },
    "resnet101": {
        (1, 2): (0.853, 0.80),
        (2, 1667): (1.414, 1.42),
        (4, 256): (2.774, 2.18),
        (8, 150): (4.294, 2.89),
    },
}
