"""Two runs that write to one folder: neither deletes what it has just written."""

import os

import pytest
import torch

import pipetransformer as pt
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.core import tensor_files as files
from tests.engine.scenario import config, make_engine
from tests.support.toy import ToySet

WARNING = "expected files of this run alone since it began, got one of another"


def engine_in(folder):
    wanted = pt.CheckpointConfig(directory=folder, every_steps=1, keep=2)
    return make_engine(
        freeze=pt.freeze.Never(), depth=1, config=config(checkpoint=wanted)
    )


def names(folder):
    return sorted(int(path.name[-6:-3]) for path in folder.iterdir())


def written_by_another(path, source):
    """Write the checkpoint of a run that goes on elsewhere."""
    content = torch.load(source, weights_only=True)
    content["extra"]["run_id"] = "another"
    torch.save(content, path)
    return path


@pytest.mark.parametrize("step", [2, 50])
def test_a_run_keeps_its_files_beside_those_of_one_that_is_further(
    step, tmp_path, caplog
):
    found, orders = [], []
    with engine_in(tmp_path) as engine:
        for batch in engine.batches(ToySet(32), 4):
            if batch.index == 3:
                own = checkpoint.path_of_step(tmp_path, batch.index)
                for other in range(step, step + 3):
                    path = checkpoint.path_of_step(tmp_path, other)
                    if path != own:
                        written_by_another(path, own)
            engine.step(batch)
            found.append(names(tmp_path))
            orders.append(next(iter(checkpoint.times(tmp_path)), None))
    assert 4 in found[4] and {4, 5} <= {*found[5]}
    assert orders[5] == checkpoint.path_of_step(tmp_path, 5).name, "the newest"
    assert caplog.text.count(WARNING) == 1


def test_files_of_an_older_run_whose_times_have_changed_are_still_its_own(tmp_path):
    with engine_in(tmp_path) as engine:
        for batch in engine.batches(ToySet(32), 4):
            engine.step(batch)
    older = names(tmp_path)
    with engine_in(tmp_path) as engine:
        for batch in engine.batches(ToySet(32), 4):
            if batch.index == 1:
                for path in tmp_path.iterdir():
                    os.utime(path)  # a copy, or a backup that was put back
            engine.step(batch)
            if batch.index == 2:
                found = names(tmp_path)
    assert older == [7, 8] and 2 in found


def test_a_run_alone_says_nothing_and_reads_none_of_its_files(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(checkpoint, "read", None)  # not to be called
    with engine_in(tmp_path) as engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(32), 4):
                engine.step(batch)
    assert names(tmp_path) == [15, 16] and WARNING not in caplog.text


def test_a_file_that_was_just_saved_is_never_deleted(tmp_path):
    first, second, third = (checkpoint.path_of_step(tmp_path, n) for n in (1, 2, 3))
    for number, path in enumerate((first, second, third)):
        files.write(path, number)
        os.utime(path, ns=(number, number))
    checkpoint.prune(tmp_path, keep=1, saved=first)
    assert names(tmp_path) == [1, 3]
