"""Types of the C++ extension; checked by stubtest."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R")

# core
def hash_bytes(data: bytes, seed: int = ...) -> int: ...

# planner

# autofreeze

# pipe
class WorkerPool:
    def __init__(self, num_workers: int, intra_op_threads: int) -> None: ...
    @property
    def num_workers(self) -> int: ...
    def map(self, fn: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]: ...
    def shutdown(self) -> None: ...

class DrawScope:
    def __init__(
        self, seed: int, step: int, microbatch: int, layer: int, keyed: bool
    ) -> None: ...
    def enter(self) -> None: ...
    def exit(self) -> None: ...

class DrawSettings:
    def __init__(
        self, keyed: bool, seed: int, step: int, first_microbatch: int
    ) -> None: ...

class PipeEngine:
    def __init__(
        self,
        pool: WorkerPool,
        plain: Sequence[object],
        checkpointed: Sequence[object],
        recomputed: Sequence[object],
        devices: Sequence[torch.device],
        first_layers: Sequence[int],
    ) -> None: ...
    def forward(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        parameters: Sequence[Sequence[torch.Tensor]],
        num_microbatches: int,
        even: bool,
        checkpoint: str,
        draws: DrawSettings,
    ) -> object: ...
    def run(
        self, microbatches: Sequence[tuple[object, ...]], draws: DrawSettings
    ) -> list[object]: ...

def keyed_draws_work() -> bool: ...
def set_draw_layer(layer: int) -> None: ...
def draw_seed() -> int: ...
def is_checkpointing() -> bool: ...
def is_recomputing() -> bool: ...
def gather_one(value: object) -> object: ...
def split_rows(num_rows: int, num_microbatches: int, even: bool) -> list[int]: ...
def gpipe_order_text(
    num_microbatches: int, num_stages: int, num_recomputed: int
) -> tuple[str, str]: ...

# autodp

# autocache
