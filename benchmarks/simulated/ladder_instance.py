"""The ladder's instance: a ViT-like model, the paper's cluster, a freeze schedule."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

from pipetransformer.planner import CacheTiers, Cluster, LayerProfile, Profile, paper

NUM_EPOCHS = 10
STATIC_LENGTH = 8
TIMED_ROWS = 25  # rows of a micro-batch under static K=8 with the paper's M
SAMPLE_BYTES = 197 * 768 * 4  # between two blocks: tokens x width x float32
LARGEST_MICROBATCH = 400
EMBEDDING, ATTENTION, MLP = 742_656, 2_363_904, 4_723_968  # ViT-B/16, parameters
TAIL = (1_536, 769_000)  # last norm; classifier of 1000 classes
FLOAT_BYTES = 4
PLENTY = 1 << 50


@dataclass(frozen=True)
class Rates:
    """How long things take. Free: nothing in the ladder fixes them but one row.

    Attributes:
        block_forward_ns: Forward of one block for 25 samples; backward takes twice
            that.
        overhead_ns: What half a block's forward takes longer for every micro-batch,
            however small; its backward twice that.
        device_link_bytes_per_s: Between devices of a node.
        network_bytes_per_s: Between nodes.
        cache_bytes_per_s: Reads and writes of a node's activation cache together.
        copies: Whether a copy between stages keeps both devices busy ("serial").
    """

    block_forward_ns: int = 18_000_000
    overhead_ns: int = 0
    device_link_bytes_per_s: int | None = 15_754_000_000
    network_bytes_per_s: int | None = 5_000_000_000
    cache_bytes_per_s: int = 8_000_000_000
    copies: str = "serial"


@dataclass(frozen=True)
class Instance:
    """What is trained, where, and how fast it freezes.

    Attributes:
        num_blocks: L.
        alpha: Share of the active blocks that freezes at every epoch.
        num_nodes: Of the cluster.
        devices_per_node: A pipeline stays within a node.
        global_batch: Samples of a step while it is constant.
        memory_limited: Whether a device holds no more parameters, with gradients and
            optimizer state, than the largest stage of the paper's eight.
    """

    num_blocks: int = 12
    alpha: Fraction = Fraction(1, 3)
    num_nodes: int = 2
    devices_per_node: int = 8
    global_batch: int = 800
    memory_limited: bool = True

    def frozen_blocks(self) -> list[int]:
        """Return the number of frozen blocks at each epoch."""
        active = 1 - self.alpha
        return [
            math.ceil(self.num_blocks * (1 - active**epoch))
            for epoch in range(NUM_EPOCHS)
        ]

    def unit_sizes(self) -> list[int]:
        """Return the parameters of each unit, as the paper's rules count them."""
        return [EMBEDDING, *(ATTENTION, MLP) * self.num_blocks, *TAIL]

    def paper_lengths(self) -> list[int]:
        """Return the pipeline length of each epoch by the paper's rule."""
        return paper.num_stages_by_epoch(self.unit_sizes(), self.frozen_blocks())

    def cluster(
        self, rates: Rates, num_stages: int = 2, num_microbatches: int = 2
    ) -> Cluster:
        """Return the machines, with one optimizer value per parameter (momentum).

        The paper's rule counts no gradients besides the parameters', which pipelines
        hold for a moment: the limit has room for those of a pipeline of this shape.

        Args:
            rates: Of links and the cache.
            num_stages: K.
            num_microbatches: M.
        """
        largest = paper.largest_load(self.unit_sizes(), STATIC_LENGTH)
        plain = num_stages == num_microbatches == 1
        further = 0 if plain else 1 + (num_microbatches > 1)  # sums, those that pass
        limit = (3 + further) * FLOAT_BYTES * largest  # parameter, gradient, momentum
        return Cluster(
            num_nodes=self.num_nodes,
            devices_per_node=self.devices_per_node,
            device_memory_bytes=limit if self.memory_limited else PLENTY,
            device_link_bytes_per_s=rates.device_link_bytes_per_s,
            network_bytes_per_s=rates.network_bytes_per_s,
            optimizer_bytes_per_parameter_byte=1.0,
            cache=CacheTiers(
                host_bytes=PLENTY, host_bytes_per_s=rates.cache_bytes_per_s
            ),
        )


def boundary_of(frozen_blocks: int) -> int:
    """Return the first active layer: the embedding freezes with the first block."""
    return 1 + 2 * frozen_blocks if frozen_blocks else 0


@functools.cache
def profile_of(
    instance: Instance,
    rates: Rates,
    *,
    frozen_blocks: int = 0,
    read_blocks: int = 0,
    left_in_stages: bool = False,
    drops_input_grad: bool = False,
) -> Profile:
    """Return the layers: embedding, two halves per block, tail.

    Embedding and tail take no time. Memory counts what trains, as the paper's rule
    does: frozen layers hold no bytes. A micro-batch takes ``overhead + time x rows``.

    Args:
        instance: The model.
        rates: Its speed.
        frozen_blocks: These hold no parameters.
        read_blocks: The cache has their outputs, so their forward takes no time.
        left_in_stages: Frozen blocks are no prefix but layers that do not train.
        drops_input_grad: Whether backward is told apart into its halves, so that the
            first active layer can save the first of them; else it is one piece.
    """
    half = rates.block_forward_ns // 2
    sizes = (1, LARGEST_MICROBATCH)
    boundary = boundary_of(frozen_blocks)

    def times(count: int) -> tuple[int, ...]:
        per_row = count * half
        overhead = count * rates.overhead_ns
        return tuple(overhead + per_row * rows // TIMED_ROWS for rows in sizes)

    def layer(index: int, name: str, parameters: int, timed: bool) -> LayerProfile:
        nothing = times(0)
        is_frozen, is_read = index < boundary, index < boundary_of(read_blocks)
        parts = (1, 1) if drops_input_grad else (0, 2)
        return LayerProfile(
            name=name,
            forward_ns=times(1) if timed else nothing,
            input_grad_ns=times(parts[0]) if timed else nothing,
            weight_grad_ns=times(parts[1]) if timed else nothing,
            forward_only_ns=times(1) if timed and not is_read else nothing,
            parameter_bytes=0 if is_frozen else FLOAT_BYTES * parameters,
            activation_bytes_per_sample=0,
            weight_grad_activation_bytes_per_sample=0,
            boundary_bytes_per_sample=SAMPLE_BYTES,
            trainable=not (left_in_stages and is_frozen),
        )

    halves = (("attention", ATTENTION), ("mlp", MLP)) * instance.num_blocks
    layers = [layer(0, "embedding", EMBEDDING, timed=False)]
    for name, parameters in halves:
        layers.append(layer(len(layers), name, parameters, timed=True))
    layers.append(layer(len(layers), "tail", sum(TAIL), timed=False))
    return Profile(name="ladder", microbatch_samples=sizes, layers=tuple(layers))
