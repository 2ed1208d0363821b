"""The old import names, each in an interpreter that never heard of them."""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.compat

ROOT = pathlib.Path(__file__).resolve().parents[2]
SYNC = "torch.distributed.pipeline.sync"
OLD_NAMES = {
    SYNC: ["Pipe", "NoChunk", "WithDevice", "is_checkpointing", "is_recomputing"],
    f"{SYNC}.pipe": ["Pipe", "PipeSequential", "WithDevice", "BalanceError"],
    f"{SYNC}.skip": ["skippable", "stash", "pop", "verify_skippables", "Namespace"],
    f"{SYNC}.skip.skippable": [
        "Skippable",
        "skippable",
        "stash",
        "pop",
        "verify_skippables",
    ],
    f"{SYNC}.skip.namespace": ["Namespace"],
    f"{SYNC}.skip.layout": ["inspect_skip_layout"],
    f"{SYNC}.skip.tracker": ["SkipTracker", "use_skip_tracker"],
    f"{SYNC}.utils": ["partition_model"],
    f"{SYNC}.batchnorm": ["DeferredBatchNorm"],
    f"{SYNC}.checkpoint": ["is_checkpointing", "is_recomputing"],
    f"{SYNC}.microbatch": ["Batch", "NoChunk", "check", "scatter", "gather"],
    f"{SYNC}._balance": ["balance_by_time", "balance_by_size"],
    f"{SYNC}._balance.blockpartition": ["solve"],
    f"{SYNC}._balance.profile": ["layerwise_sandbox", "profile_times", "profile_sizes"],
}
TORCHGPIPE_NAMES = {
    "torchgpipe": ["GPipe", "is_checkpointing", "is_recomputing", "__version__"],
    "torchgpipe.__version__": ["__version__"],
    "torchgpipe.gpipe": ["GPipe", "verify_module"],
    "torchgpipe.batchnorm": ["DeferredBatchNorm"],
    "torchgpipe.checkpoint": ["is_checkpointing", "is_recomputing"],
    "torchgpipe.microbatch": ["Batch", "check", "scatter", "gather"],
    "torchgpipe.skip": OLD_NAMES[f"{SYNC}.skip"],
    "torchgpipe.skip.skippable": OLD_NAMES[f"{SYNC}.skip.skippable"],
    "torchgpipe.skip.namespace": ["Namespace"],
    "torchgpipe.skip.layout": ["inspect_skip_layout"],
    "torchgpipe.skip.tracker": ["SkipTracker", "use_skip_tracker"],
    "torchgpipe.balance": ["balance_by_time", "balance_by_size"],
    "torchgpipe.balance.blockpartition": ["solve"],
    "torchgpipe.balance.profile": [
        "layerwise_sandbox",
        "profile_times",
        "profile_sizes",
    ],
}
# What `import *` of a program gives.
OLD_LISTS = {
    SYNC: ["Pipe", "is_checkpointing", "is_recomputing"],
    f"{SYNC}.skip": ["Namespace", "pop", "skippable", "stash", "verify_skippables"],
    "torchgpipe": ["GPipe", "is_checkpointing", "is_recomputing"],
    "torchgpipe.balance": ["balance_by_size", "balance_by_time"],
    "torchgpipe.skip": ["Namespace", "pop", "skippable", "stash", "verify_skippables"],
}
ROOM = "pipetransformer.pipe"
HOMES = {
    "GPipe": ROOM,
    "NoChunk": ROOM,
    "Pipe": ROOM,
    "PipeSequential": ROOM,
    "WithDevice": ROOM,
    "DeferredBatchNorm": ROOM,
    "partition_model": ROOM,
    "is_checkpointing": ROOM,
    "is_recomputing": ROOM,
    "Skippable": f"{ROOM}.skip",
    "verify_module": f"{ROOM}.gpipe",
    "Namespace": f"{ROOM}.skip",
    "pop": f"{ROOM}.skip",
    "skippable": f"{ROOM}.skip",
    "stash": f"{ROOM}.skip",
    "verify_skippables": f"{ROOM}.skip",
    "inspect_skip_layout": "pipetransformer.skip.layout",
    "SkipTracker": "pipetransformer.skip.tracker",
    "use_skip_tracker": "pipetransformer.skip.tracker",
    "solve": f"{ROOM}.balance.blockpartition",
    "layerwise_sandbox": f"{ROOM}.balance.profile",
}


def in_fresh_interpreter(*lines, warnings="error"):
    program = "\n".join(lines)
    result = subprocess.run(
        [sys.executable, "-W", warnings, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def import_lines(names):
    for module, members in names.items():
        yield f"from {module} import {', '.join(members)}"
        for member in members:
            if member in HOMES:
                yield (
                    f"import {HOMES[member]} as home; "
                    f"assert {member} is home.{member}, '{module}.{member}'"
                )
    for module in names:
        yield f"import {module}"


def test_every_old_name_is_our_object_and_install_is_silent():
    # Warnings are errors in that interpreter.
    in_fresh_interpreter(
        "import pipetransformer.compat as compat",
        "compat.install()",
        "import sys, warnings",
        *import_lines(OLD_NAMES),
        "assert sys.modules['torch.distributed.pipeline.sync.pipe'].Pipe is Pipe",
        "assert issubclass(BalanceError, ValueError)",
        "from torch.distributed.pipeline.sync import *",
        "assert 'torchgpipe' not in sys.modules",
    )


def test_torchgpipe_names_are_ours():
    in_fresh_interpreter(
        "import pipetransformer.compat as compat",
        "compat.install(torchgpipe=True)",
        *import_lines(TORCHGPIPE_NAMES),
        "import pipetransformer.compat.torchgpipe as ours",
        "assert torchgpipe is ours and ours.skip.skippable is skippable",
        "try:",
        "    import torchgpipe_balancing",
        "except ImportError as error:",
        "    assert 'torchgpipe.balance' in str(error)",
        "else:",
        "    raise AssertionError",
    )


@pytest.mark.parametrize(
    "line",
    [
        "import torchgpipe",
        "import torchgpipe.__version__",
        "import torchgpipe.__version__; import torchgpipe.gpipe",
        "import torchgpipe; import importlib; "
        "importlib.import_module('torchgpipe.__version__')",
    ],
)
def test_torchgpipe_version_is_text_however_it_is_imported(line):
    out = in_fresh_interpreter(
        "import pipetransformer.compat as compat",
        "compat.install(torchgpipe=True)",
        line,
        "compat.install(torchgpipe=True)",
        "from torchgpipe.__version__ import __version__ as inner",
        "from torchgpipe import __version__ as outer",
        "print(torchgpipe.__version__, inner, outer)",
    )
    assert out.split() == ["0.0.7"] * 3


def test_import_star_gives_the_old_lists():
    in_fresh_interpreter(
        "import pipetransformer.compat as compat, importlib",
        "compat.install(torchgpipe=True)",
        f"lists = {OLD_LISTS!r}",
        "for name, expected in lists.items():",
        "    namespace = {}",
        "    exec(f'from {name} import *', namespace)",
        "    assert sorted(set(namespace) - {'__builtins__'}) == expected, name",
    )


def test_classes_can_be_subclassed_and_recognised():
    in_fresh_interpreter(
        "import pipetransformer.compat as compat, torch",
        "compat.install(torchgpipe=True)",
        "from torch import nn",
        "import torchgpipe",
        f"import {SYNC} as sync",
        "cpu = [torch.device('cpu')] * 2",
        "x = torch.ones(4, 2)",
        "def layers(): return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))",
        "class MyPipe(sync.Pipe):",
        "    def forward(self, x): return super().forward(x).local_value()",
        "class MyGPipe(torchgpipe.GPipe):",
        "    def __init__(self, module, **kw): super().__init__(module, [1, 1], **kw)",
        "    def forward(self, x): return 2 * super().forward(x)",
        "class Stage(sync.pipe.PipeSequential): pass",
        "class Whole(sync.NoChunk): pass",
        "class Placed(sync.WithDevice): pass",
        "class Norm(torchgpipe.batchnorm.DeferredBatchNorm): pass",
        "class Names(sync.skip.Namespace): pass",
        "class Tracker(sync.skip.tracker.SkipTracker): pass",
        "class Part(sync.microbatch.Batch): pass",
        "model = layers()",
        "pipe = MyPipe(model, chunks=2)",
        "gpipe = MyGPipe(model, devices=cpu, chunks=2, deferred_batch_norm=True)",
        "assert torch.equal(2 * pipe(x), gpipe(x))",
        "assert isinstance(gpipe[1], torchgpipe.batchnorm.DeferredBatchNorm)",
        "assert isinstance(pipe.partitions[0], sync.pipe.PipeSequential)",
        "assert isinstance(pipe.partitions[0], nn.Sequential)",
        "assert Stage(nn.Identity())(x) is x",
        "assert MyPipe(nn.Sequential(nn.Linear(2, 2), Placed(nn.ReLU(), 'cpu')))(x)"
        ".shape == (4, 2)",
        "assert Whole(x).tensor is x and isinstance(Whole(x), sync.NoChunk)",
        "assert isinstance(Names(), sync.skip.Namespace) and Names() != Names()",
        "assert isinstance(Norm(2), torchgpipe.batchnorm.DeferredBatchNorm)",
        "assert Part(x).tensor is x and len(Tracker()) == 0",
        "@torchgpipe.skip.skippable(stash='a')",
        "class Layer(nn.Module): pass",
        "assert isinstance(Layer(), torchgpipe.skip.skippable.Skippable)",
        "assert issubclass(Layer, sync.skip.skippable.Skippable)",
    )


def test_torchgpipe_room_needs_no_install():
    in_fresh_interpreter(
        "from pipetransformer.compat.torchgpipe import GPipe",
        "from pipetransformer.compat.torchgpipe.skip import skippable",
        "from pipetransformer.compat.torchgpipe.balance import balance_by_time",
        "import sys",
        "assert 'torchgpipe' not in sys.modules",
        "assert 'torch.distributed.pipeline' not in sys.modules",
    )


def test_attribute_is_there_without_a_further_import():
    in_fresh_interpreter(
        "import torch, pipetransformer.compat",
        "assert not hasattr(torch.distributed, 'pipeline')",
        "pipetransformer.compat.install()",
        "from pipetransformer.pipe import Pipe",
        "assert torch.distributed.pipeline.sync.Pipe is Pipe",
        "assert torch.distributed.pipeline.sync.pipe.Pipe is Pipe",
        "torch.distributed.pipeline.sync._balance.profile.layerwise_sandbox",
    )


def test_skippable_is_decorator_and_module():
    in_fresh_interpreter(
        "import pipetransformer.compat; pipetransformer.compat.install()",
        f"import {SYNC}.skip.skippable",
        f"from {SYNC} import skip",
        "from pipetransformer.pipe.skip import skippable, verify_skippables",
        "assert skip.skippable is skippable",
        "assert skip.skippable.skippable is skippable",
        "assert skip.skippable.verify_skippables is verify_skippables",
        "import importlib",
        f"module = importlib.import_module('{SYNC}.skip.skippable')",
        "assert module.skippable is skippable and module is not skippable",
    )


def test_install_again_changes_nothing():
    in_fresh_interpreter(
        "import pipetransformer.compat as compat, sys",
        "from pipetransformer.pipe.strict import is_strict",
        "compat.install(torchgpipe=True, strict=True)",
        "before, finders = dict(sys.modules), list(sys.meta_path)",
        "compat.install(torchgpipe=True); compat.install()",
        "assert before == sys.modules and finders == sys.meta_path",
        "assert is_strict()",
    )


def test_strict_install_asks_for_rpc():
    in_fresh_interpreter(
        "import pipetransformer.compat as compat",
        "compat.install()",
        "from torch import nn",
        f"from {SYNC} import Pipe",
        "Pipe(nn.Sequential(nn.Linear(2, 2)))",
        "compat.install(strict=True)",
        "try:",
        "    Pipe(nn.Sequential(nn.Linear(2, 2)))",
        "except RuntimeError as error:",
        "    assert 'Please initialize RPC framework' in str(error)",
        "else:",
        "    raise AssertionError",
    )


def test_foreign_module_under_an_old_name_is_not_replaced():
    in_fresh_interpreter(
        "import sys, types",
        "theirs = sys.modules['torchgpipe'] = types.ModuleType('torchgpipe')",
        "import pipetransformer.compat as compat",
        "try:",
        "    compat.install(torchgpipe=True)",
        "except RuntimeError as error:",
        "    assert 'torchgpipe: expected no such module' in str(error)",
        "else:",
        "    raise AssertionError",
        "assert sys.modules['torchgpipe'] is theirs",
        "assert 'torch.distributed.pipeline' not in sys.modules",
    )


def test_engine_internals_are_not_offered():
    in_fresh_interpreter(
        "import pipetransformer.compat; pipetransformer.compat.install()",
        "try:",
        f"    import {SYNC}.worker",
        "except ModuleNotFoundError:",
        "    pass",
        "else:",
        "    raise AssertionError",
    )
