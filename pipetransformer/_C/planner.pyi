from collections.abc import Sequence

class Layer:
    forward_ns: list[int]
    input_grad_ns: list[int]
    weight_grad_ns: list[int]
    forward_only_ns: list[int]
    parameter_bytes: int
    trainable_bytes: int
    activation_bytes_per_sample: int
    weight_grad_activation_bytes_per_sample: int
    activation_bytes_per_microbatch: int
    shared_activation_bytes: int
    boundary_bytes_per_sample: int
    trainable: bool
    optimizer_ns: int
    optimizer_bytes: int | None
    def __init__(self) -> None: ...

class Profile:
    microbatch_samples: list[int]
    layers: list[Layer]
    tied_layers: list[tuple[int, int]]
    skips: list[tuple[int, int]]
    def __init__(self) -> None: ...

class CacheTiers:
    host_bytes: int
    host_bytes_per_s: int
    disk_bytes: int
    disk_bytes_per_s: int
    host_record_ns: int
    host_in_line: bool
    def __init__(self) -> None: ...

class Cluster:
    num_nodes: int
    devices_per_node: int
    device_memory_bytes: int
    device_link_bytes_per_s: int | None
    device_link_latency_ns: int
    network_bytes_per_s: int | None
    network_latency_ns: int
    optimizer_bytes_per_parameter_byte: float | None
    context_bytes: int
    cores_permille: int
    replica_link_bytes_per_s: int | None
    replica_link_latency_ns: int
    step_ns: int
    row_ns: int
    cache: CacheTiers | None
    def __init__(self) -> None: ...

class Checkpoint:
    NEVER: Checkpoint
    EXCEPT_LAST: Checkpoint
    ALWAYS: Checkpoint
    __members__: dict[str, Checkpoint]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class CopyModel:
    OVERLAPPED: CopyModel
    SERIAL: CopyModel
    __members__: dict[str, CopyModel]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class CacheTier:
    NONE: CacheTier
    DEVICE: CacheTier
    HOST: CacheTier
    DISK: CacheTier
    __members__: dict[str, CacheTier]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Shape:
    def __init__(
        self, num_stages: int, num_replicas: int, num_microbatches: int
    ) -> None: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...

class Workload:
    global_batch: int
    boundary: int
    checkpoint: Checkpoint
    copies: CopyModel
    num_samples: int | None
    accumulation_steps: int
    def __init__(self) -> None: ...

class Choice:
    def __init__(
        self,
        shape: Shape,
        schedule: ScheduleKind,
        prefix: PrefixPlacement,
        cache: CacheTier,
        cuts: list[int],
    ) -> None: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def schedule(self) -> ScheduleKind: ...
    @property
    def prefix(self) -> PrefixPlacement: ...
    @property
    def cache(self) -> CacheTier: ...
    @property
    def cuts(self) -> list[int]: ...

class Request:
    workload: Workload
    num_stages: int | None
    max_replicas: int | None
    min_replicas: int
    all_replicas: bool
    num_microbatches: int | None
    cuts: list[int] | None
    min_microbatch_samples: int
    schedules: list[ScheduleKind]
    prefix_placements: list[PrefixPlacement]
    cache_tiers: list[CacheTier]
    def __init__(self) -> None: ...

class Candidate:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def choice(self) -> Choice: ...
    @property
    def estimate_ns(self) -> int: ...
    @property
    def lower_bound_ns(self) -> int: ...
    @property
    def simulated_ns(self) -> int: ...
    @property
    def bubble_fraction(self) -> float: ...
    @property
    def bytes_per_stage(self) -> list[int]: ...

class RefusalCause:
    MEMORY: RefusalCause
    FIXED_MEMORY: RefusalCause
    SHARED_PARAMETERS: RefusalCause
    BATCH: RefusalCause
    __members__: dict[str, RefusalCause]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Refusal:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def cause(self) -> RefusalCause: ...
    @property
    def missing_bytes(self) -> int: ...
    @property
    def stage_begin(self) -> int: ...
    @property
    def stage_end(self) -> int: ...
    @property
    def layer(self) -> int: ...

class Result:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def candidates(self) -> list[Candidate]: ...
    @property
    def exhaustive(self) -> bool: ...
    @property
    def refusals(self) -> list[Refusal]: ...

def prefix_cuts(
    profile: Profile, boundary: int, samples: int, num_devices: int
) -> list[int]: ...
def search(profile: Profile, cluster: Cluster, request: Request) -> Result: ...
def step_costs(
    profile: Profile,
    cluster: Cluster,
    workload: Workload,
    choice: Choice,
) -> StepCosts: ...

_CostRow = tuple[list[int], list[int], list[int], bool]

_Rules = tuple[
    list[bool],
    list[tuple[list[int], int]],
    list[tuple[list[int], list[int], list[int], int]],
]

def min_max(
    costs: _CostRow, rules: _Rules, num_stages: int
) -> tuple[int, list[int]] | None: ...
def min_max_by_position(
    rules: _Rules, num_stages: int
) -> tuple[int, list[int]] | None: ...
def staircase(
    forward: _CostRow, backward: _CostRow, rules: _Rules, num_stages: int
) -> list[tuple[int, int, list[int]]]: ...
def cheapest_cuts(
    cut_costs: list[int], rules: _Rules, num_stages: int
) -> tuple[int, list[int]] | None: ...
def best_cuts(
    forward: _CostRow,
    backward: _CostRow | None,
    repeats: int,
    cut_costs: list[int],
    hiding_cut_costs: list[int],
    exposure: tuple[list[int], list[int]] | None,
    accumulation_steps: int,
    rules: _Rules,
    num_stages: int,
    cutoff: int | None,
) -> tuple[int, list[int], bool] | None: ...
def paper_partition(
    active_sizes: list[int], frozen_sizes: list[int], num_stages: int
) -> list[int]: ...
def paper_largest_load(
    active_sizes: list[int], frozen_sizes: list[int], num_stages: int
) -> int: ...
def paper_compress(
    active_sizes: list[int],
    frozen_sizes: list[int],
    num_stages: int,
    largest_allowed: int,
) -> int: ...
def paper_num_microbatches(num_stages: int) -> int: ...

class TransitionKind:
    NONE: TransitionKind
    BOUNDARY: TransitionKind
    CUTS: TransitionKind
    SHAPE: TransitionKind
    __members__: dict[str, TransitionKind]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Placement:
    def __init__(
        self, shape: Shape, cuts: Sequence[int], state_bytes: Sequence[int]
    ) -> None: ...

class Crowded:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def node(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def old_bytes(self) -> int: ...
    @property
    def new_bytes(self) -> int: ...

class Moves:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def device_bytes(self) -> int: ...
    @property
    def replica_bytes(self) -> int: ...
    @property
    def across_nodes(self) -> bool: ...
    @property
    def crowded(self) -> Crowded | None: ...

class RunningMean:
    def __init__(self, sum_ns: int, count: int) -> None: ...
    @property
    def sum_ns(self) -> int: ...
    @property
    def count(self) -> int: ...

class PauseModel:
    prepare: RunningMean
    group: RunningMean
    move: RunningMean
    rewire: RunningMean
    compare: RunningMean
    first_step: RunningMean
    def __init__(self) -> None: ...

class Pause:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def prepare_ns(self) -> int: ...
    @property
    def move_ns(self) -> int: ...
    @property
    def rewire_ns(self) -> int: ...
    @property
    def first_step_ns(self) -> int: ...
    @property
    def cache_ns(self) -> int: ...
    @property
    def total_ns(self) -> int: ...

class Reshape:
    PRICED: Reshape
    ALWAYS: Reshape
    NEVER: Reshape
    __members__: dict[str, Reshape]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class TransitionRule:
    CANNOT_STAY: TransitionRule
    ALWAYS: TransitionRule
    PAYS: TransitionRule
    NEVER: TransitionRule
    TOO_LITTLE: TransitionRule
    CROWDED: TransitionRule
    TOO_DEAR: TransitionRule
    TOO_SOON: TransitionRule
    __members__: dict[str, TransitionRule]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Offer:
    kind: TransitionKind
    step_in_force_ns: int | None
    step_ns: int
    remaining_steps: int
    pace_permille: int
    pause_ns: int
    anyway_ns: int
    hysteresis_permille: int
    since_last_ns: int | None
    crowded: bool
    reshape: Reshape
    def __init__(self) -> None: ...

class Verdict:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def accepted(self) -> bool: ...
    @property
    def rule(self) -> TransitionRule: ...
    @property
    def gain_ns_per_step(self) -> int: ...
    @property
    def extra_pause_ns(self) -> int: ...
    @property
    def pay_back_steps(self) -> int | None: ...

def transition_kind(
    from_: Placement, to: Placement, same_order: bool
) -> TransitionKind: ...
def moves(
    profile: Profile,
    cluster: Cluster,
    from_: Placement,
    to: Placement,
) -> Moves: ...
def clipped_cuts(cuts: Sequence[int], boundary: int) -> list[int] | None: ...
def observed(mean: RunningMean, ns: int, per: int) -> RunningMean: ...
def predicted_pause(
    model: PauseModel,
    cluster: Cluster,
    kind: TransitionKind,
    moves: Moves,
    cache_bytes: int,
) -> Pause: ...
def decide(offer: Offer) -> Verdict: ...
def best_offer(offers: Sequence[Offer], verdicts: Sequence[Verdict]) -> int | None: ...

class ScheduleKind:
    GPIPE: ScheduleKind
    ONE_F_ONE_B: ScheduleKind
    ZB_H1: ScheduleKind
    __members__: dict[str, ScheduleKind]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class PrefixPlacement:
    NONE: PrefixPlacement
    REPLICATED: PrefixPlacement
    PIPELINED: PrefixPlacement
    FILLED: PrefixPlacement
    __members__: dict[str, PrefixPlacement]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class StageCosts:
    forward_ns: int
    recompute_ns: int
    input_grad_ns: int
    weight_grad_ns: int
    forward_copy_ns: int
    backward_copy_ns: int
    has_backward: bool
    all_reduce_ns: int
    network_all_reduce_ns: int
    state_bytes: int
    kept_bytes: int
    recomputed_bytes: int
    kept_for_weights_bytes: int
    shared_bytes: int
    summed_gradient_bytes: int
    passing_gradient_bytes: int
    def __init__(self) -> None: ...

class StepCosts:
    schedule: ScheduleKind
    num_microbatches: int
    num_recomputed: int
    stages: list[StageCosts]
    prefix_placement: PrefixPlacement
    prefix_ns: list[int]
    prefix_grain_ns: int
    prefix_copy_ns: int
    cache_read_ns: int
    cache_wait_ns: int
    process_ns: int
    accumulation_steps: int
    cores_permille: int
    replicas_per_node: int
    def __init__(self) -> None: ...
