"""Types of the C++ extension; checked by stubtest."""

from collections.abc import Sequence

from torch import Tensor

# core
def hash_bytes(data: bytes, seed: int = ...) -> int: ...

# planner
class PlannerLayer:
    forward_ns: list[int]
    input_grad_ns: list[int]
    weight_grad_ns: list[int]
    forward_only_ns: list[int]
    parameter_bytes: int
    activation_bytes_per_sample: int
    boundary_bytes_per_sample: int
    trainable: bool
    def __init__(self) -> None: ...

class PlannerProfile:
    microbatch_samples: list[int]
    layers: list[PlannerLayer]
    tied_layers: list[tuple[int, int]]
    def __init__(self) -> None: ...

class PlannerCluster:
    num_nodes: int
    devices_per_node: int
    device_memory_bytes: int
    device_link_bytes_per_s: int | None
    device_link_latency_ns: int
    network_bytes_per_s: int | None
    network_latency_ns: int
    optimizer_bytes_per_parameter_byte: float
    context_bytes: int
    def __init__(self) -> None: ...

class PlannerCheckpoint:
    NEVER: PlannerCheckpoint
    EXCEPT_LAST: PlannerCheckpoint
    ALWAYS: PlannerCheckpoint
    __members__: dict[str, PlannerCheckpoint]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class PlannerShape:
    def __init__(
        self, num_stages: int, num_replicas: int, num_microbatches: int
    ) -> None: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...

class PlannerWorkload:
    global_batch: int
    boundary: int
    checkpoint: PlannerCheckpoint
    prefix_cached: bool
    def __init__(self) -> None: ...

class PlannerRequest:
    workload: PlannerWorkload
    num_stages: int | None
    max_replicas: int | None
    num_microbatches: int | None
    cuts: list[int] | None
    current: PlannerShape | None
    min_microbatch_samples: int
    def __init__(self) -> None: ...

class PlannerCandidate:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def shape(self) -> PlannerShape: ...
    @property
    def cuts(self) -> list[int]: ...
    @property
    def step_ns(self) -> int: ...
    @property
    def bytes_per_stage(self) -> list[int]: ...

class PlannerRefusalCause:
    MEMORY: PlannerRefusalCause
    FIXED_MEMORY: PlannerRefusalCause
    SHARED_PARAMETERS: PlannerRefusalCause
    BATCH: PlannerRefusalCause
    __members__: dict[str, PlannerRefusalCause]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class PlannerRefusal:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def shape(self) -> PlannerShape: ...
    @property
    def cause(self) -> PlannerRefusalCause: ...
    @property
    def missing_bytes(self) -> int: ...
    @property
    def stage_begin(self) -> int: ...
    @property
    def stage_end(self) -> int: ...
    @property
    def layer(self) -> int: ...

class PlannerResult:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def candidates(self) -> list[PlannerCandidate]: ...
    @property
    def chosen(self) -> PlannerCandidate: ...
    @property
    def kept_current(self) -> bool: ...
    @property
    def refusals(self) -> list[PlannerRefusal]: ...

def planner_search(
    profile: PlannerProfile, cluster: PlannerCluster, request: PlannerRequest
) -> PlannerResult: ...
def planner_min_max(
    costs: list[int],
    entry: list[int],
    exit: list[int],
    bytes: list[int],
    memory_bytes: int,
    cut_allowed: list[bool],
    num_stages: int,
) -> tuple[int, list[int]] | None: ...
def planner_staircase(
    forward: list[int],
    backward: list[int],
    bytes: list[int],
    memory_bytes: int,
    cut_allowed: list[bool],
    num_stages: int,
) -> list[tuple[int, int, list[int]]]: ...
def planner_paper_partition(unit_sizes: list[int], num_stages: int) -> list[int]: ...
def planner_paper_largest_load(unit_sizes: list[int], num_stages: int) -> int: ...
def planner_paper_compress(
    active_unit_sizes: list[int], num_stages: int, largest_allowed: int
) -> int: ...
def planner_paper_num_microbatches(num_stages: int) -> int: ...

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
class CacheCounts:
    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def stale(self) -> int: ...
    @property
    def corrupt(self) -> int: ...
    @property
    def stored(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def full(self) -> int: ...

class ActivationStore:
    @staticmethod
    def create(
        run_id: str,
        num_samples: int,
        slot_bytes: int,
        budget_bytes: int,
        verify_all: bool,
    ) -> ActivationStore: ...
    @staticmethod
    def attach(path: str, run_id: str, verify_all: bool) -> ActivationStore: ...
    def fetch(
        self, ids: Tensor, chain: list[int], input_hashes: Tensor | None
    ) -> list[tuple[int, Tensor, list[Tensor]]]: ...
    def store(
        self,
        ids: Tensor,
        tensors: list[Tensor],
        boundary: int,
        fingerprint: int,
        input_hashes: Tensor | None,
    ) -> int: ...
    def counts(self) -> CacheCounts: ...
    def close(self) -> None: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def descriptor(self) -> int: ...

def record_bytes(tensors: list[Tensor]) -> int: ...
def hash_tensor(tensor: Tensor, seed: int) -> int: ...
def hash_rows(tensors: list[Tensor]) -> Tensor: ...
