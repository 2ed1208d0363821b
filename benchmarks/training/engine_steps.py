"""Steps of the engine and of plain loops, timed in turns in the same processes.

Each rank of a case builds the engine and two equal plain loops, and runs some steps of
each, in another order every round. It logs the time of each system in each round, then
what a profile says of the steps, and what stood on the stack at the first layer.
"""

from __future__ import annotations

import contextlib
import cProfile
import dataclasses
import gc
import itertools
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import pipetransformer as pt
from harness.child import RunFailed
from harness.forked import Log, Ranks
from training.step_parts import own_frames, parts_of

ENGINE, PLAIN, AGAIN = "engine", "plain", "plain again"
SYSTEMS = (ENGINE, PLAIN, AGAIN)
LAYERS, WIDTH, CLASSES, ROWS = 12, 32, 2, 32  # rows of a replica's batch
DEADLINE = timedelta(seconds=30)  # of a plain loop's collective
POLL_S = 0.1
PROFILED = 10  # steps of a turn under the profiler

Steps = Iterator[object]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: In which each system has its turn.
        steps: Of each turn.
        warm: Steps of each system before the first round.
        profiled: Steps under the profiler.
    """

    rounds: int
    steps: int
    warm: int
    profiled: int

    @property
    def all_steps(self) -> int:
        """Steps of each system: one before the plan is known, one for the stack."""
        return 1 + self.warm + self.rounds * self.steps + self.profiled + 1


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compared.

    Attributes:
        name: For tables.
        world_size: Processes, a replica each.
        frozen: Leading layers that are frozen and cached.
    """

    name: str
    world_size: int = 1
    frozen: int = 0


ALONE = Case("one process")
REPLICAS = Case("two replicas", world_size=2)
CACHED = Case("cached but the head", frozen=LAYERS - 1)
CASES = {case.name: case for case in (ALONE, REPLICAS, CACHED)}


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to `x`, ``(rows, width)``."""
        outer: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + outer


def tiny_model() -> nn.Sequential:
    """Return [linear, block * 10, head], equal wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = [Block() for _ in range(LAYERS - 2)]
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES)
        )


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random inputs in two classes."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class KeyedSamples(Samples):
    """The same, whose inputs need not be loaded where they are cached."""

    def inputs(self, index: int) -> Tensor:
        """Return a sample's input."""
        return self.x[index]

    def targets(self, index: int) -> Tensor:
        """Return a sample's class."""
        return self.y[index]

    def input_key(self, index: int, epoch: int) -> int:
        """Return the sample's number: its input is the same in every epoch."""
        return index


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every system."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


# -- the systems -----------------------------------------------------------------


def engine_steps(
    engine: pt.PipeTransformer, data: Samples, batch_size: int, passes: int
) -> Generator[Tensor, None, None]:
    """Train as a user's script does; the value of each step is its loss."""
    for _ in engine.epochs(passes):
        for batch in engine.batches(data, batch_size):
            yield engine.step(batch)


def loop_steps(
    model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]]
) -> Iterator[Tensor]:
    """Train one pass in a plain loop."""
    optimizer, loss_of = make_optimizer(model.parameters()), nn.CrossEntropyLoss()
    for inputs, targets in loader:
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


def head_steps(head: nn.Module, kept: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Train the head one pass on rows of what the layers before it gave."""
    optimizer, loss_of = make_optimizer(head.parameters()), nn.CrossEntropyLoss()
    for ids in torch.split(torch.randperm(len(kept)), ROWS):
        loss = loss_of(head(kept[ids]), targets[ids])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


def plain_loop(case: Case, data: Samples) -> Iterator[Tensor]:
    """Return a plain loop that does the work of a case."""
    model = tiny_model()
    if case.frozen:
        with torch.no_grad():
            kept = model[: case.frozen](data.x)
        return head_steps(model[-1], kept, data.y)
    if case.world_size == 1:
        return loop_steps(model, DataLoader(data, batch_size=ROWS, shuffle=True))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return loop_steps(ddp, DataLoader(data, batch_size=ROWS, sampler=sampler))


def make_engine(case: Case, model: nn.Sequential) -> pt.PipeTransformer:
    """Return the engine of a case: one stage, one micro-batch, one thread."""
    return pt.PipeTransformer(
        model,
        optimizer=make_optimizer,
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([case.frozen]),
        config=pt.Config(
            plan=pt.PlanConfig(num_stages=1, num_microbatches=1, replicas="all"),
            pipe=pt.PipeConfig(threads_per_stage=1),
        ),
    )


def check_plan(case: Case, engine: pt.PipeTransformer) -> None:
    """Refuse to measure another plan than the case's.

    Raises:
        RuntimeError: it is another one.
    """
    plan, wanted = engine.plan, (1, case.world_size, 1, case.frozen)
    found = plan and (
        plan.num_stages,
        plan.num_replicas,
        plan.num_microbatches,
        plan.boundary,
    )
    if found != wanted:
        raise RuntimeError(f"{case.name}: expected K, R, M, L {wanted}, got {found}")


# -- measuring -------------------------------------------------------------------


def timed(steps: Steps, count: int) -> list[float]:
    """Return the seconds of each of so many steps, loading its batch included."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        next(steps)
        found.append(time.perf_counter() - start)
    return found


def in_turns(
    systems: Mapping[str, Steps],
    rounds: int,
    steps: int,
    meet: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, list[float]]]:
    """Yield the seconds of each system's steps, round by round.

    Args:
        systems: By name. Their order is another one in each round, so that each comes
            behind each other one equally often.
        rounds: How many.
        steps: Of each system in a round.
        meet: Waits for the other ranks; called before each turn.
    """
    orders = itertools.cycle(itertools.permutations(systems))
    for order in itertools.islice(orders, rounds):
        found = {}
        for name in order:
            meet()
            found[name] = timed(systems[name], steps)
        yield found


def profiles(
    systems: Mapping[str, Steps], count: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return what each part took of a step of each system, see `step_parts`.

    The systems take turns under the profiler, too.
    """
    profilers = {name: cProfile.Profile() for name in systems}
    for done in range(0, count, PROFILED):
        for name, profiler in profilers.items():
            profiler.enable()
            for _ in range(min(PROFILED, count - done)):
                next(systems[name])
            profiler.disable()
    return {
        name: {
            part: dataclasses.asdict(own)
            for part, own in parts_of(pstats.Stats(profiler), count).items()
        }
        for name, profiler in profilers.items()
    }


def stack_at(layer: nn.Module, steps: Steps) -> dict[str, Any]:
    """Return how many frames and files of the engine a layer is called through."""
    places: list[str] = []
    hook = layer.register_forward_pre_hook(lambda *_: places.extend(own_frames()))
    next(steps)
    hook.remove()
    return {"frames": len(places), "files": sorted(set(places))}


def measure(
    log: Log,
    case: Case,
    effort: Effort,
    systems: Mapping[str, Steps],
    layer: nn.Module,
) -> None:
    """Run the rounds and log them; profiles and stacks are of the cases of one rank."""
    alone = case.world_size == 1
    meet: Callable[[], object] = (lambda: None) if alone else dist.barrier
    for steps in systems.values():
        timed(steps, effort.warm)
    gc.collect()
    gc.freeze()  # so that collections look at what the steps make
    for found in in_turns(systems, effort.rounds, effort.steps, meet):
        log.write(
            "round",
            median={name: statistics.median(times) for name, times in found.items()},
            mean={name: statistics.fmean(times) for name, times in found.items()},
        )
    if alone:
        compared = {name: systems[name] for name in (ENGINE, PLAIN)}
        for name, parts in profiles(compared, effort.profiled).items():
            log.write("profile", system=name, parts=parts)
        log.write("stack", **stack_at(layer, systems[ENGINE]))


def run_rank(rank: int, folder: Path, name: str, effort: Effort) -> None:
    """Measure a case on this rank.

    Raises:
        RuntimeError: the engine runs another plan, or recomputed what it had cached.
    """
    case, log = CASES[name], Log(folder / f"rank-{rank}.jsonl")
    batch_size = ROWS * case.world_size
    data = (KeyedSamples if case.frozen else Samples)(effort.all_steps * batch_size)
    model = tiny_model()
    with contextlib.ExitStack() as exits:
        engine = exits.enter_context(make_engine(case, model))
        passes = 2 if case.frozen else 1  # the first one fills the cache
        own = engine_steps(engine, data, batch_size, passes)
        exits.callback(own.close)
        if case.frozen:
            timed(own, effort.all_steps)
        if case.world_size > 1:
            store = FileStore(str(folder / "plain"), case.world_size)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=case.world_size,
                timeout=DEADLINE,
            )
            exits.callback(dist.destroy_process_group)
        loops = {system: plain_loop(case, data) for system in (PLAIN, AGAIN)}
        timed(own, 1)
        check_plan(case, engine)
        measure(log, case, effort, {ENGINE: own, **loops}, model[case.frozen])
        loops.clear()
        gc.collect()  # a reducer must not hold the last reference to its group
    if case.frozen and engine.history.epochs[-1].cache_misses:
        raise RuntimeError(f"{name}: expected every row from the cache, got misses")
    log.write("end")


# -- a case as its caller sees it --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the ranks of a case logged.

    Attributes:
        medians: By system, of each round the median step of its slowest rank, in us.
        means: The same of the mean steps.
        parts: By system and part the fields of `step_parts.Own`; of one rank.
        stack: Frames and files of the engine at the first layer.
    """

    medians: dict[str, list[float]]
    means: dict[str, list[float]]
    parts: dict[str, dict[str, dict[str, float]]]
    stack: dict[str, Any]


def measure_case(case: Case, effort: Effort, *, timeout_s: float) -> Measured:
    """Run the ranks of a case to their end.

    Raises:
        RunFailed: a rank ended with an error, or not by the deadline; all are ended.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, many = Path(name), case.world_size > 1
        with Ranks(
            run_rank, case.world_size, folder, case.name, effort, own_store=many
        ) as ranks:
            end = time.monotonic() + timeout_s
            while any(p.is_alive() for p in ranks.processes):
                failed = any(p.exitcode not in (None, 0) for p in ranks.processes)
                if failed or time.monotonic() > end:
                    break
                time.sleep(POLL_S)
            logs, errors = ranks.logs(), ranks.errors()
    return read_logs(case, effort, logs, errors, timeout_s)


def read_logs(
    case: Case,
    effort: Effort,
    logs: Sequence[Sequence[Mapping[str, Any]]],
    errors: Sequence[str],
    timeout_s: float,
) -> Measured:
    """Put together what the ranks logged.

    Raises:
        RunFailed: one of them did not come to its end.
    """
    for rank, error in enumerate(errors):
        if error:
            raise RunFailed(f"{case.name}: rank {rank} failed:\n{error}")
    for rank, log in enumerate(logs):
        last = log[-1]["kind"] if log else "nothing"
        if last != "end":
            raise RunFailed(
                f"{case.name}: expected the end of rank {rank} within {timeout_s:g} s, "
                f"got {last}"
            )
    rounds = [[line for line in log if line["kind"] == "round"] for log in logs]
    if any(len(each) != effort.rounds for each in rounds):
        raise RunFailed(f"{case.name}: expected {effort.rounds} rounds of each rank")

    def slowest(figure: str) -> dict[str, list[float]]:
        turns = list(zip(*rounds, strict=True))
        return {
            system: [1e6 * max(r[figure][system] for r in turn) for turn in turns]
            for system in SYSTEMS
        }

    lines = logs[0]
    profiles = {x["system"]: x["parts"] for x in lines if x["kind"] == "profile"}
    stacks = [line for line in lines if line["kind"] == "stack"]
    stack = {name: stacks[0][name] for name in ("frames", "files")} if stacks else {}
    return Measured(slowest("median"), slowest("mean"), profiles, stack)
