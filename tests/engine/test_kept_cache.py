"""A cache that survives the run: later runs start with what earlier ones computed."""

import dataclasses
import logging
import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer import PeerFailure
from pipetransformer.autocache import ActivationCache, cache_files, folder
from pipetransformer.autodp import ControlPlane
from tests.engine.scenario import config
from tests.support.private import model_of, run_of
from tests.support.ranks import Ranks, run_ranks
from tests.support.toy import ToySet, accuracy, toy_model

SIZE = 24


FACTOR = 2.0


class Twice(nn.Module):
    """A layer whose code changes between runs; no fingerprint sees that."""

    def forward(self, x):
        return x * FACTOR


def search(
    folder,
    *,
    lr=1e-2,
    size=SIZE,
    epochs=2,
    stop=None,
    layer=None,
    batch_size=12,
    **options,
):
    """Train a head on a frozen prefix; return losses, score, history and forwards."""
    toy = list(toy_model(3))
    layers = toy[:1] + [layer or nn.Identity()] + toy[1:]
    rows = []
    engine = pt.PipeTransformer(
        nn.Sequential(*layers),
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([3] * epochs),
        config=config(cache=pt.CacheConfig(directory=folder, **options)),
    )
    losses = []
    with engine:
        first = model_of(engine)[0]
        first.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
        for epoch in engine.epochs(epochs):
            for batch in engine.batches(ToySet(size), batch_size):
                if not losses:
                    rows.clear()  # those of the profile
                losses.append(float(engine.step(batch)))
            found = engine.evaluate(ToySet(9), {"accuracy": accuracy}, name="val")
            if stop == epoch:
                os.kill(os.getpid(), signal.SIGKILL)
    return losses, found, engine.history, sum(rows)


def test_ten_runs_over_heads_pass_the_prefix_once_and_train_as_without_a_cache(
    tmp_path,
):
    for run in range(10):
        lr = 10 ** -(1 + run / 5)
        found = search(tmp_path, lr=lr)
        plain = search(None, lr=lr, enabled=False)
        assert found[:2] == plain[:2]
        if run == 0:
            assert found[3] == SIZE + 9 + 1  # one row alone, before the first is kept
        else:  # the two first hits are computed again: audits
            assert found[3] == 2
        assert found[2].cache[0]["absent"] == (SIZE if run == 0 else 0)
    assert {file.head.space for file in cache_files(tmp_path)} == {"train", "val"}


def test_a_run_of_one_epoch_keeps_its_records(tmp_path):
    search(tmp_path, epochs=1)
    assert search(tmp_path, epochs=1)[2].epochs[0].cache_hits == SIZE


def test_layers_whose_code_changed_are_found_by_the_first_audit(
    tmp_path, monkeypatch, caplog
):
    # A batch that is found in part is computed in part, which may give other bits.
    options = {"layer": Twice(), "batch_size": SIZE, "epochs": 3}
    search(tmp_path, **options)
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    with caplog.at_level(logging.WARNING):
        found = search(tmp_path, **options)
    assert "records of earlier runs are dropped" in caplog.text
    assert found[:2] == search(None, enabled=False, **options)[:2]
    # The cache itself is in use: the second epoch finds what the first stored.
    assert [epoch.cache_hits for epoch in found[2].epochs[1:]] == [SIZE] * 2
    caplog.clear()
    again = search(tmp_path, **options)
    assert "dropped" not in caplog.text
    assert again[:2] == found[:2]


def test_other_samples_replace_the_records_and_the_cache_stays_in_use(tmp_path):
    class Others(ToySet):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + 1, y

    def run(dataset):
        engine = pt.PipeTransformer(
            toy_model(3),
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
            loss=nn.CrossEntropyLoss(),
            freeze=pt.freeze.Schedule([2] * 3),
            config=config(cache=pt.CacheConfig(directory=tmp_path)),
        )
        with engine:
            for _ in engine.epochs(3):
                for batch in engine.batches(dataset, 12):
                    engine.step(batch)
        return [epoch.cache_hits for epoch in engine.history.epochs]

    assert run(ToySet(SIZE)) == [0, SIZE, SIZE]
    assert run(Others(SIZE)) == [0, SIZE, SIZE]
    assert run(Others(SIZE)) == [SIZE, SIZE, SIZE]


def test_what_a_cache_was_given_up_for_is_not_kept(tmp_path, monkeypatch):
    saves = folder.CacheFolder._save

    def saves_late(*given):
        time.sleep(0.3)  # past the end of the run, if nobody waited
        saves(*given)

    monkeypatch.setattr(folder.CacheFolder, "_save", saves_late)

    class Noisy(ToySet):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.rand(4), y

    engine = pt.PipeTransformer(
        toy_model(3),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([2] * 3),
        config=config(cache=pt.CacheConfig(directory=tmp_path)),
    )
    with engine:
        for _ in engine.epochs(3):
            for batch in engine.batches(Noisy(SIZE), 12):
                engine.step(batch)
    # The second pass began before anybody could know: it kept the first one's.
    assert [file.head.records for file in cache_files(tmp_path)] == [SIZE]


def test_what_another_process_has_found_wrong_is_not_kept(tmp_path):
    engine = pt.PipeTransformer(
        toy_model(3),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([2]),
        config=config(cache=pt.CacheConfig(directory=tmp_path)),
    )
    with engine:
        for _ in engine.epochs(1):
            for batch in engine.batches(ToySet(SIZE), 12):
                engine.step(batch)
        run = run_of(engine)
        cache = run.caches.training()
        other = ActivationCache.attach(cache.address, run_id=run.info.run_id)
        other.fail_audit("for the test")
        other.close()
    assert cache.given_up and cache_files(tmp_path) == []


@pytest.mark.distributed
def test_a_killed_run_leaves_its_finished_epochs(tmp_path):
    # Its second epoch began: what the first stored is written, or just being.
    spawned = multiprocessing.get_context("spawn")
    for _ in range(2):
        killed = spawned.Process(
            target=search, args=(tmp_path,), kwargs={"epochs": 4, "stop": 2}
        )
        killed.start()
        killed.join(120)
        assert killed.exitcode == -signal.SIGKILL
    found = search(tmp_path)
    assert found[2].epochs[0].cache_hits == SIZE
    assert found[:2] == search(None, enabled=False)[:2]


def run_search(rank, folder):
    return search(folder)[:2]


@pytest.mark.distributed
def test_two_runs_at_once_train_as_one_and_leave_whole_files(tmp_path):
    expected = search(None, enabled=False)[:2]
    with (
        Ranks(run_search, 1, tmp_path) as one,
        Ranks(run_search, 1, tmp_path) as other,
    ):
        found = [*one.join(), *other.join()]
    assert found == [expected, expected]
    assert search(tmp_path)[3] == 2
    assert all(file.head is not None for file in cache_files(tmp_path))


def train_two(rank, folder, epochs):
    found = search(folder, epochs=epochs)
    return found[0], found[3], [dataclasses.asdict(e) for e in found[2].epochs]


@pytest.mark.distributed
def test_all_ranks_of_a_node_share_what_one_of_them_read(tmp_path):
    run_ranks(train_two, 2, tmp_path, 2)
    for _, forwards, epochs in run_ranks(train_two, 2, tmp_path, 2):
        assert forwards <= 2
        assert epochs[0]["cache_hits"] == SIZE


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"CacheConfig\.directory: expected a folder"):
        search(tmp_path / "file" / "folder")


def test_without_a_cache_no_folder_is_made(tmp_path):
    search(tmp_path / "folder", enabled=False)
    assert not (tmp_path / "folder").exists()


def freeze_later(place, epochs, prepare_steps):
    """Freeze the first unit in the second pass; return hits by pass."""
    torch.manual_seed(0)
    engine = pt.PipeTransformer(
        toy_model(3),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([0, 2]),
        config=config(
            prepare_steps=prepare_steps,
            cache=pt.CacheConfig(directory=place / "cache", admission="always"),
            checkpoint=pt.CheckpointConfig(directory=place / "runs", resume=True),
        ),
    )
    with engine:
        for _ in engine.epochs(epochs):
            for batch in engine.batches(ToySet(SIZE), 12):
                engine.step(batch)
    return [record.cache_hits for record in engine.history.epochs]


@pytest.mark.parametrize("prepare_steps", [0, 1])
def test_a_resumed_run_finds_what_was_kept_of_layers_that_froze_on_the_way(
    prepare_steps, tmp_path
):
    hits = freeze_later(tmp_path, 4, prepare_steps)
    assert hits[3] == SIZE  # the first batch comes before a plan that is prepared
    assert freeze_later(tmp_path, 5, prepare_steps) == [SIZE]


def test_a_peer_that_dies_while_a_kept_file_is_read_is_what_is_told(
    tmp_path, monkeypatch
):
    search(tmp_path)
    publish = ControlPlane.publish

    def lost(self, key, value):
        if key.startswith("slab/"):
            raise PeerFailure(1, "caching", reason="gone")
        publish(self, key, value)

    monkeypatch.setattr(ControlPlane, "publish", lost)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with pytest.raises(PeerFailure, match="gone"):
            search(tmp_path)
        assert torch.get_num_threads() == before + 1, "the block was left as a whole"
    finally:
        torch.set_num_threads(before)
