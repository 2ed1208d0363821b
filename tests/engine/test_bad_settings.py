"""A setting of a wrong kind or out of range is one clear error; texts are interface."""

import pathlib

import numpy
import pytest
import torch

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from tests.engine.scenario import make_engine
from tests.support.toy import ToySet, toy_model

NO_INT = [1.5, "4", True, False, float("nan"), float("inf"), [1]]
WRONG = [
    *[(pt.CheckpointConfig, "every_epochs", v, "an int") for v in [*NO_INT, None]],
    *[(pt.CheckpointConfig, "every_steps", v, "an int or None") for v in NO_INT],
    *[(pt.CheckpointConfig, "keep", v, "an int") for v in [*NO_INT, None]],
    *[(pt.CheckpointConfig, "max_failures", v, "an int") for v in [*NO_INT, None]],
    *[(pt.CheckpointConfig, "resume", v, "a bool") for v in [None, 0, 1, "no", []]],
    *[
        (pt.CheckpointConfig, "directory", v, "a str or a path or None")
        for v in [0, True, b"runs", ["runs"]]
    ],
    *[(pt.Config, "freeze_every", v, "an int or None") for v in NO_INT],
    *[(pt.Config, "prepare_steps", v, "an int") for v in [*NO_INT, None]],
    *[(pt.Config, "seed", v, "an int") for v in [*NO_INT, None]],
    *[(pt.Config, "eval_microbatch_rows", v, "an int") for v in [*NO_INT, None]],
    *[(pt.Config, "clip_grad_norm", v, "a number or None") for v in ["1", True, [1]]],
    *[(pt.Config, "plan", v, "a PlanConfig") for v in [None, {}, pt.PlanConfig]],
    *[(pt.Config, "autodp", v, "an AutoDPConfig") for v in [None, {}, "continue"]],
    (pt.Config, "checkpoint", "runs", "a CheckpointConfig"),
    *[(pt.PlanConfig, "num_stages", v, "an int or None") for v in NO_INT],
    *[(pt.PlanConfig, "hysteresis", v, "a number") for v in ["0", None, True]],
    *[
        (pt.PlanConfig, "microbatch_samples", v, "a sequence of ints")
        for v in [None, 4, "14", [1, 2.5], {1, 2}]
    ],
    (pt.PlanConfig, "cuts", [0, "2"], "a sequence of ints or None"),
    (pt.CacheConfig, "enabled", "no", "a bool"),
    (pt.PipeConfig, "num_slots", 2.0, "an int"),
]


@pytest.mark.parametrize(("room", "name", "value", "expected"), WRONG)
def test_a_value_of_another_kind_is_refused_by_name(room, name, value, expected):
    with pytest.raises(TypeError) as caught:
        room(**{name: value})
    text = f"{room.__name__}.{name}: expected {expected}, got {value!r}"
    assert str(caught.value) == text


def test_numbers_of_numpy_and_paths_are_taken(tmp_path):
    wanted = pt.CheckpointConfig(directory=tmp_path, every_steps=numpy.int64(3))
    config = pt.Config(freeze_every=numpy.int32(2), checkpoint=wanted)
    assert config.facts() == config.facts()
    assert (
        pt.PlanConfig(cuts=range(3), hysteresis=numpy.float32(0.5)).num_stages is None
    )


@pytest.mark.parametrize("value", [{}, "config", pt.CheckpointConfig()])
def test_the_engine_takes_a_config_or_none(value):
    with pytest.raises(TypeError, match="config: expected a Config or None, got "):
        pt.PipeTransformer(
            toy_model(2),
            optimizer=torch.optim.SGD,
            loss=torch.nn.CrossEntropyLoss(),
            freeze=pt.freeze.Never(),
            config=value,
        )


@pytest.mark.parametrize("value", ["", pathlib.Path("file", "below"), "a\0b"])
def test_a_folder_that_cannot_hold_checkpoints_is_refused_at_once(
    value, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").write_text("")
    with pytest.raises(
        ValueError, match=r"^CheckpointConfig.directory: expected a fol"
    ):
        wanted = pt.CheckpointConfig(directory=value)
        with make_engine(freeze=pt.freeze.Never(), config=pt.Config(checkpoint=wanted)):
            pass


def test_the_folder_of_checkpoints_is_there_when_the_run_opens(tmp_path):
    wanted = pt.CheckpointConfig(directory=tmp_path / "new" / "deep")
    with make_engine(
        freeze=pt.freeze.Never(), config=pt.Config(checkpoint=wanted)
    ) as engine:
        assert (tmp_path / "new" / "deep").is_dir()
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(16), 8):
                engine.step(batch)
    assert checkpoint.newest_valid(tmp_path / "new" / "deep") is not None


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_path_without_a_files_name_is_refused(path, tmp_path):
    text = "path: expected the name of a file to write, got "
    with make_engine(freeze=pt.freeze.Never()) as engine:
        engine.prepare(ToySet(16), 8)
        for write in (engine.save, engine.export):
            with pytest.raises(ValueError, match=text):
                write(path)
        engine.save(bytes(tmp_path / "file"))
    with pytest.raises(ValueError, match=text):
        pt.export_checkpoint(tmp_path / "file", path)


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {}}])
def test_what_is_no_checkpoint_is_told_so(content, tmp_path):
    torch.save(content, tmp_path / "file")
    kind = type(content).__name__
    with pytest.raises(ValueError, match=f"of this library, format 1, got a {kind} w"):
        pt.export_checkpoint(tmp_path / "file", tmp_path / "weights")


def call_with(call, value):
    with make_engine(freeze=pt.freeze.Never()) as engine:
        if call == "epochs":
            next(engine.epochs(value))
        else:
            next(engine.batches(ToySet(16), value))


@pytest.mark.parametrize("value", [*NO_INT, None])
@pytest.mark.parametrize("call", ["epochs", "batch_size"])
def test_counts_of_the_loop_are_ints(call, value):
    with pytest.raises(TypeError) as caught:
        call_with(call, value)
    assert str(caught.value) == f"{call}: expected an int, got {value!r}"


@pytest.mark.parametrize("call", ["epochs", "batch_size"])
def test_counts_of_the_loop_begin_at_one(call):
    with pytest.raises(ValueError, match=f"^{call}: expected at least 1, got 0"):
        call_with(call, 0)
    call_with(call, numpy.int64(8))


def test_a_folder_is_no_file_to_write(tmp_path):
    with (
        make_engine(freeze=pt.freeze.Never()) as engine,
        pytest.raises(IsADirectoryError, match=str(tmp_path)),
    ):
        engine.export(tmp_path)
    assert list(tmp_path.iterdir()) == []
