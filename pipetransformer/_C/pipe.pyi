from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R")

class SpareRun:
    def wait(self) -> None: ...
    def cancel(self) -> None: ...

class WorkerPool:
    def __init__(self, num_workers: int, intra_op_threads: int) -> None: ...
    @property
    def num_workers(self) -> int: ...
    def map(self, fn: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]: ...
    def spare(
        self, function: Callable[[_T], bool], items: Sequence[_T]
    ) -> SpareRun: ...
    def drain(self, timeout_s: float) -> bool: ...
    def cpu_seconds(self) -> list[float]: ...
    def shutdown(self) -> None: ...

def shutdown_all_pools() -> None: ...

class DrawScope:
    def __init__(
        self, seed: int | None, step: int, microbatch: int, layer: int, keyed: bool
    ) -> None: ...
    def enter(self) -> None: ...
    def exit(self) -> None: ...

class DrawSettings:
    def __init__(
        self, mode: str, seed: int | None, step: int, first_microbatch: int
    ) -> None: ...

class CallOptions:
    def __init__(self) -> None: ...
    num_microbatches: int
    even: bool
    min_rows: int
    checkpoint: str
    dispatch: str
    strict: bool
    spread: bool
    order_rule: bool
    early_recompute: bool
    copy_streams: bool
    record: bool
    draws: DrawSettings

class CallStages:
    def __init__(
        self,
        functions: Sequence[tuple[object, object, tuple[object, ...] | None]],
        parameters: Sequence[Sequence[torch.Tensor]],
    ) -> None: ...

class PipeEngine:
    def __init__(
        self,
        pool: WorkerPool,
        devices: Sequence[torch.device],
        first_layers: Sequence[int],
        lanes: Sequence[tuple[int, int]],
        own_streams: bool,
    ) -> None: ...
    def forward(
        self,
        stages: CallStages,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        options: CallOptions,
    ) -> object: ...
    def step(
        self,
        stages: CallStages,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        targets: object,
        loss: object,
        schedule: str,
        options: CallOptions,
    ) -> torch.Tensor: ...
    def run(
        self,
        stages: CallStages,
        microbatches: Sequence[tuple[tuple[object, ...], dict[str, object]]],
        options: CallOptions,
    ) -> list[object]: ...
    def current_dispatch(self) -> str: ...

class DispatchChoice:
    def __init__(self, blocking: bool) -> None: ...
    def observe(self, shortest_ns: Sequence[int]) -> None: ...
    def current(self) -> str: ...

class NoChunk:
    def __init__(self, tensor: torch.Tensor) -> None: ...
    @property
    def tensor(self) -> torch.Tensor: ...

def keyed_draws_work() -> bool: ...
def check_no_tangents(tensors: Sequence[torch.Tensor]) -> None: ...
def trace_cells(most: int) -> None: ...
def take_cells() -> tuple[list[tuple[str, int, int, int, int]], int]: ...
def set_draw_layer(layer: int) -> None: ...
def is_checkpointing() -> bool: ...
def is_recomputing() -> bool: ...
def gather_one(value: object, strict: bool) -> object: ...
def schedule_text(
    name: str,
    num_microbatches: int,
    num_stages: int,
    num_recomputed: int,
    first_stage: int,
) -> tuple[str, list[int]]: ...
def parse_schedule(text: str) -> list[list[tuple[str, int, int]]]: ...
