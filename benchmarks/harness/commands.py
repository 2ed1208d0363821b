"""The one table of published measurements: each result file and the command it is of.

`bench.py` runs them, `make bench` and its like call that, and tools/readme_tables.py
refuses a result of any other command. Needs nothing but the standard library.
"""

from __future__ import annotations

import ast
import shlex
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/results"
PRODUCT = ("csrc", "pipetransformer")
PIPE = ("csrc/pipe", "csrc/python", "pipetransformer/pipe", "pipetransformer/skip")
PLANNER = ("csrc/planner", "csrc/python", "pipetransformer/planner")
SIMULATOR = ("csrc/simulator", "csrc/python", "pipetransformer/simulator")
CACHE = ("csrc/autocache", "csrc/python", "pipetransformer/autocache")
# Parts: which target of the Makefile runs a command.
BENCH, SEEDS, HOSTS, MODELS = "bench", "seeds", "hosts", "models"


@dataclass(frozen=True)
class Command:
    """One measurement.

    Attributes:
        name: Of its result file, without ``.json``.
        program: What the interpreter is given before ``--json``.
        measures: Paths of what is measured: a later commit to them makes the result
            older than the code. The script's own files are among them.
        part: The Makefile's target that runs it.
    """

    name: str
    program: tuple[str, ...]
    measures: tuple[str, ...]
    part: str = BENCH

    @property
    def arguments(self) -> tuple[str, ...]:
        """The interpreter's arguments, from the top folder."""
        return (*self.program, "--json", f"{RESULTS}/{self.name}.json")

    @property
    def line(self) -> str:
        """The command line as a result file holds it."""
        return shlex.join(["python", *self.arguments])


def _script(
    name: str,
    measures: tuple[str, ...],
    part: str = BENCH,
    *,
    file: str = "",
    options: tuple[str, ...] = (),
) -> Command:
    path = f"benchmarks/{file or name}.py"
    return Command(name, (path, *options), (*measures, *_files_of(path)), part)


def _files_of(path: str, known: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return a script and the files alongside it that it imports, directly or not."""
    tree = ast.parse((_ROOT / path).read_text())
    found = {path}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            file = f"benchmarks/{name.replace('.', '/')}.py"
            if file not in known | found and (_ROOT / file).is_file():
                found |= set(_files_of(file, known | found))
    return tuple(sorted(found))


_TABLE1 = (
    *PRODUCT,
    *_files_of("benchmarks/training/table1_worker.py"),
)  # started by name

_ALL = (
    _script("table1_speedup", _TABLE1),
    _script("fig10_alpha", _TABLE1),
    _script("engine_overhead", PRODUCT),
    _script("signal_cost", (*PRODUCT, "examples/vit_digits.py")),
    _script("cache_bandwidth", CACHE),
    _script("cache_exactness", (*CACHE, "pipetransformer/replica/frozen_prefix.py")),
    _script(
        "fig12_cache_timing", (*CACHE, "pipetransformer/replica", "pipetransformer/run")
    ),
    _script("pipe_overhead", PIPE),
    _script("pipe_throughput", PIPE),
    _script("pipe_overlap", PIPE),
    _script("unet_timeline", PIPE),
    _script("pipe_models", PIPE),
    _script("partition_quality", PLANNER),
    _script("planner_time", (*PLANNER, *SIMULATOR)),
    _script("simulator_accuracy", (*PIPE, *PLANNER, *SIMULATOR)),
    _script("fig11_microbatches", (*PIPE, *PLANNER, *SIMULATOR)),
    _script("paper_ladder", (*PLANNER, *SIMULATOR)),
    _script("fault_injection", PRODUCT),
    _script(
        "fault_injection_continue",
        PRODUCT,
        file="fault_injection",
        options=("--policy", "continue"),
    ),
    _script("random_losses", PRODUCT),
    _script("failure_time", ("csrc/autodp", "pipetransformer/autodp")),
    _script("endurance", PRODUCT),
    _script("transition_time", PRODUCT),
    _script("transformation_curve", PRODUCT),
    _script("kills_and_resumes", PRODUCT),
    _script("demo_seeds", (*PRODUCT, "examples"), SEEDS),
    *(
        _script(
            f"real_models_{name}",
            (*PRODUCT, "examples", "benchmarks/training/text_worker.py"),
            MODELS,
            file="real_models",
            options=("--tasks", *options.split()),
        )
        # Half an hour of a quiet machine for the first seed, a quarter for the others.
        for name, options in (
            ("sst2", "sst2 --seeds 1"),
            ("sst2_more", "sst2 --first-seed 1 --seeds 2"),
            ("xquad", "xquad --seeds 1"),
            ("xquad_more", "xquad --first-seed 1 --seeds 2"),
        )
    ),
    *(
        _script(
            name,
            (
                *PRODUCT,
                "examples/vit_digits.py",
                "benchmarks/training/freezing_worker.py",
            ),
            MODELS,
            file="freezing",
            options=options,
        )
        # An hour or two each, XQuAD and all of SST-2 that in several sittings; the
        # first shows all policies on digits, the second on text, the last has the seeds
        # that a margin of 0.3 points needs, none of which the stake was chosen with.
        for name, options in (
            ("freezing", ("--seeds", "4", "--jobs", "2")),
            (
                "freezing_text",
                (
                    *("--tasks", "sst2 1024", "--seeds", "6", "--policies"),
                    *("cap 1/5", "cap 1/3", "cap 1/2"),
                    *("gradient", "autofreeze", "guarded"),
                    *("--jobs", "2", "--minutes", "30"),
                ),
            ),
            (
                "freezing_held_out",
                (
                    *("--tasks", "sst2 1024", "--seeds", "4"),
                    *("--policies", "guarded, held-out loss"),
                ),
            ),
            (
                "freezing_random",
                (
                    *("--tasks", "sst2 1024, random weights", "--seeds", "6"),
                    *("--policies", "cap 1/3", "guarded"),
                ),
            ),
            (
                "freezing_xquad",
                (
                    *("--tasks", "xquad", "--seeds", "6"),
                    *("--policies", "cap 1/3", "guarded"),
                    *("--jobs", "2", "--minutes", "30"),
                ),
            ),
            (
                "freezing_sst2",
                (
                    *("--tasks", "sst2", "--seeds", "6"),
                    *("--policies", "cap 1/3", "guarded"),
                    *("--jobs", "2", "--minutes", "30"),
                ),
            ),
            (
                "freezing_curves",
                (
                    *("--tasks", "digits", "digits 50 %", "sst2 1024"),
                    *("--policies", "cap 1/3", "gradient", "guarded"),
                    *("--seeds", "4", "--curves"),
                ),
            ),
            (
                "freezing_seeds",
                (
                    *("--policies", "cap 1/3", "guarded"),
                    *("--first-seed", "16", "--seeds", "16", "--jobs", "2"),
                ),
            ),
        )
    ),
    *(
        _script(
            name,
            (
                *PRODUCT,
                "examples/vit_digits.py",
                *_files_of("benchmarks/training/freezing_time_worker.py"),
            ),
            MODELS,
            file="freezing_time",
            options=options,
        )
        for name, options in (
            ("freezing_time", ()),
            ("freezing_time_text", ("--tasks", "sst2 1024")),
        )
    ),
    _script(
        "step_prediction",
        (*PRODUCT, "benchmarks/training/prediction_worker.py"),
        MODELS,
    ),
    _script(
        "bubble_filling",
        (*PRODUCT, "benchmarks/training/prediction_worker.py"),
        MODELS,
    ),
    _script(
        "memory_prediction",
        (*PRODUCT, "benchmarks/training/prediction_worker.py"),
        MODELS,
        file="step_prediction",
        options=("--memory",),
    ),
    _script(
        "text_cache",
        (*PRODUCT, "examples", "benchmarks/training/text_worker.py"),
        MODELS,
    ),
    _script(
        "cache_search",
        (*PRODUCT, "examples", "benchmarks/training/search_worker.py"),
        MODELS,
    ),
    Command(
        "two_hosts",
        ("-m", "tests.distributed.two_hosts"),
        (*PRODUCT, "tests/distributed/two_hosts.py"),
        HOSTS,
    ),
)
COMMANDS = {command.name: command for command in _ALL}
