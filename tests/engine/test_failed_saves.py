"""A run's own saves on a disk that fails: one that fails costs no run, nor a file."""

import errno
import logging
import os
import pathlib

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from tests.engine.scenario import config, make_engine
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet


def train(folder, epochs, **wanted):
    """Train; return the error that ended it, and the names of what it left."""
    wanted = pt.CheckpointConfig(directory=folder, **wanted)
    error = None
    try:
        with make_engine(
            freeze=pt.freeze.Never(), depth=1, config=config(checkpoint=wanted)
        ) as engine:
            for _ in engine.epochs(epochs):
                for batch in engine.batches(ToySet(8), 8):
                    engine.step(batch)
    except OSError as found:
        error = found
    return error, sorted(path.name for path in folder.iterdir())


def fill_disk(monkeypatch, *saves, error=None):
    """Let these saves find the disk full, or fail otherwise, counted from 1 on."""
    failure = error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real, count = torch.save, [0]

    def save(content, file, *args, **options):
        if isinstance(content, dict) and "format" in content:
            count[0] += 1
            if count[0] in saves:
                raise failure
        return real(content, file, *args, **options)

    monkeypatch.setattr(torch, "save", save)


def test_an_automatic_save_that_fails_is_a_warning_and_the_next_is_tried(
    tmp_path, monkeypatch, caplog
):
    fill_disk(monkeypatch, 1, 2, 4, 5)
    error, names = train(tmp_path, 6)
    assert error is None
    assert names == ["step-0000000003.pt", "step-0000000006.pt"]
    own = (r for r in caplog.records if r.name == "pipetransformer.checkpoint.autosave")
    texts = [record.getMessage() for record in own]
    assert len(texts) == 4 and all("No space left on device" in t for t in texts)
    assert [text.split(",")[0][-6:] for text in texts] == ["failed"] * 4
    assert ["1 in a row" in text for text in texts] == [True, False, True, False]


def test_the_last_state_is_saved_at_the_end_where_its_save_has_failed(
    tmp_path, monkeypatch, caplog
):
    fill_disk(monkeypatch, 3)
    error, names = train(tmp_path, 3)
    assert error is None and names[-1] == "step-0000000003.pt"
    assert "is in no checkpoint" not in caplog.text
    other = tmp_path / "other"
    other.mkdir()
    fill_disk(monkeypatch, 3, 4)
    error, names = train(other, 3)
    assert error is None and names[-1] == "step-0000000002.pt"
    assert "step 3, the last one, is in no checkpoint" in caplog.text


def test_a_save_without_memory_is_as_one_that_the_disk_refused(
    tmp_path, monkeypatch, caplog
):
    fill_disk(monkeypatch, 2, error=MemoryError("8 GiB"))
    error, names = train(tmp_path, 3)
    assert error is None
    assert names == ["step-0000000001.pt", "step-0000000003.pt"]
    path = checkpoint.path_of_step(tmp_path, 2)
    assert f"file {path}: expected to fit into memory, got: 8 GiB" in caplog.text


@pytest.mark.parametrize("most", [1, 3])
def test_so_many_failed_saves_in_a_row_end_the_run(most, tmp_path, monkeypatch, caplog):
    fill_disk(monkeypatch, *range(2, 100))
    error, names = train(tmp_path, 10, max_failures=most)
    assert error.errno == errno.ENOSPC
    last = checkpoint.path_of_step(tmp_path, 1 + most)
    assert error.filename == str(last)
    assert names == ["step-0000000001.pt"]
    assert caplog.text.count("in a row; the next") == most - 1


def test_a_save_that_the_user_asks_for_raises_at_once(tmp_path, monkeypatch):
    with make_engine(freeze=pt.freeze.Never(), depth=1) as engine:
        engine.prepare(ToySet(8), 8)
        fill_disk(monkeypatch, 1)
        with pytest.raises(OSError, match="No space left"):
            engine.save(tmp_path / "file")


def test_a_save_is_good_when_no_older_one_can_be_deleted(tmp_path, monkeypatch, caplog):
    real = pathlib.Path.unlink

    def unlink(path, missing_ok=False):
        if not path.name.startswith("."):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        real(path, missing_ok)

    monkeypatch.setattr(pathlib.Path, "unlink", unlink)
    error, names = train(tmp_path, 3, keep=1)
    assert error is None and len(names) == 3
    assert caplog.text.count("neither counted nor deleted: [Errno 5]") == 3


def test_a_file_whose_time_cannot_be_set_takes_no_name(tmp_path, monkeypatch, caplog):
    """By its own time it might come before files that are older."""

    def refuse(file, *args, **options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "utime", refuse)
    error, names = train(tmp_path, 2)
    assert error.errno == errno.EIO and names == []  # once more at the end
    assert caplog.text.count("Input/output error") == 3  # with the emergency save


class Masked(nn.Linear):
    """Has a mask of -Inf that nobody trains."""

    def __init__(self):
        super().__init__(4, 3)
        mask = torch.full((3, 3), -torch.inf).triu(1)
        self.mask = nn.Parameter(mask, requires_grad=False)


def leave_badly(folder, model, weight=0.5):
    """Leave by an error; a weight has another value between passes alone."""
    wanted = pt.CheckpointConfig(directory=folder, every_epochs=1, keep=9)
    engine = pt.PipeTransformer(
        model,
        optimizer=torch.optim.SGD,
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Never(),
        config=config(checkpoint=wanted),
    )
    with pytest.raises(ZeroDivisionError), engine:
        for epoch in engine.epochs(3):
            with torch.no_grad():
                model[0].bias[0] = 0.5
            for batch in engine.batches(ToySet(8), 8):
                engine.step(batch)
            with torch.no_grad():
                model[0].bias[0] = weight
            if epoch == 2:
                raise ZeroDivisionError
    return sorted(path.name for path in folder.iterdir())


def test_a_mask_of_inf_that_nobody_trains_keeps_no_file_from_being_written(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Masked())
    names = [f"step-{step:010d}.pt" for step in (1, 2, 3)]
    assert leave_badly(tmp_path, model) == names


def test_files_that_are_left_out_for_nan_are_told_once(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    assert leave_badly(tmp_path, model, torch.nan) == []
    text = "no checkpoint of step 1, nor of later ones with NaN or Inf among the"
    assert caplog.text.count(text) == caplog.text.count("no checkpoint of step") == 1
    assert "no emergency checkpoint: NaN or Inf among the weights" in caplog.text


def leave_in_a_child(rank, folder):
    """Fork within the block; the child leaves it by an exception, the parent goes on.

    Returns:
        The child's exit code, what lay in the folder when it had ended, and in the end.
    """
    wanted = pt.CheckpointConfig(directory=folder)
    child = None
    try:
        with make_engine(
            freeze=pt.freeze.Never(), depth=1, config=config(checkpoint=wanted)
        ) as engine:
            for _ in engine.epochs(2):
                for batch in engine.batches(ToySet(8), 4):
                    engine.step(batch)
                if child is None:
                    child = os.fork()
                    if child == 0:
                        raise RuntimeError("in the child")
                    _, status = os.waitpid(child, 0)
                    then = sorted(path.name for path in folder.iterdir())
    except RuntimeError:
        if child != 0:
            raise
        os._exit(7)
    return os.waitstatus_to_exitcode(status), then, len(list(folder.iterdir()))


@pytest.mark.distributed
def test_a_forked_child_that_leaves_the_block_writes_nothing(tmp_path):
    (found,) = run_ranks(leave_in_a_child, 1, tmp_path)
    assert found == (7, [], 2)


@pytest.fixture(autouse=True)
def _warnings_only(caplog):
    caplog.set_level(logging.WARNING, logger="pipetransformer")
