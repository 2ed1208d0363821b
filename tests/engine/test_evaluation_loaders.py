"""Evaluation and prediction whose samples loader processes load."""

import gc
import multiprocessing
import os
import random

import numpy
import pytest
import torch
from torch.utils.data import default_collate

import pipetransformer as pt
from tests.engine.scenario import config, make_engine, schedule
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy

SIZE = 37  # five micro-batches of seven or eight rows


class Signed(ToySet):
    """Leaves the number of each process that loads of it."""

    def __init__(self, folder):
        super().__init__(SIZE)
        self.folder = folder

    def __getitem__(self, index):
        (self.folder / str(os.getpid())).touch()
        return super().__getitem__(index)


class Noisy(ToySet):
    """Adds what the global generators give."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        noise = [random.random(), numpy.random.rand(), float(torch.rand(1)), 0]
        return x + torch.tensor(noise), y


def inputs_only(samples):
    return {"input": default_collate(samples)[0]}


def use(rank, workers, num_stages):
    """Train with evaluations and predictions; return their results."""
    multiprocessing.current_process().daemon = False  # ranks may start no loaders
    plan = pt.PlanConfig(num_stages=num_stages)
    engine = make_engine(freeze=schedule(0, 3), config=config(plan=plan))
    found = []
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(ToySet(24), 8):
                engine.step(batch)
                if batch.index == 1:  # of the active ranks alone
                    engine.evaluate(ToySet(SIZE), num_workers=workers)
            options = {"num_workers": workers, "name": "valid"}
            found.append(
                engine.evaluate(ToySet(SIZE), {"accuracy": accuracy}, **options)
            )
            predicted = engine.predict(
                ToySet(SIZE),
                collate_fn=inputs_only,
                num_workers=workers,
                name="outputs",
                to="all",
            )
            found.append(None if predicted is None else predicted.tolist())
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "num_stages"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_results_are_the_same_with_loader_processes(ranks, num_stages):
    here, there = (run_ranks(use, ranks, n, num_stages) for n in (0, 2))
    assert len(here[0]) == 4 and here[0][1]
    assert there == here


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_as_many_processes_load_as_were_asked_for(workers, tmp_path):
    with make_engine(freeze=schedule(0)) as engine:
        engine.prepare(ToySet(24), 8)
        engine.evaluate(Signed(tmp_path), num_workers=workers)
        found = {path.name for path in tmp_path.iterdir()}
        assert len(found) == max(workers, 1)
        assert (str(os.getpid()) in found) == (workers == 0)


def test_random_samples_are_the_same_for_any_number_of_processes():
    with make_engine(freeze=schedule(0)) as engine:
        engine.prepare(ToySet(24), 8)
        begun = torch.get_rng_state()
        noisy = [engine.evaluate(Noisy(SIZE), num_workers=n) for n in (1, 2, 1)]
        assert noisy[1:] == noisy[:-1]
        assert noisy[0] != engine.evaluate(ToySet(SIZE), num_workers=1)
        assert torch.equal(torch.get_rng_state(), begun), "evaluation has drawn"


@pytest.mark.parametrize("call", ["evaluate", "predict", "batches"])
@pytest.mark.parametrize(("workers", "kind"), [(-1, ValueError), (1.5, TypeError)])
def test_a_number_of_processes_that_is_none_is_refused(call, workers, kind):
    with make_engine(freeze=schedule(0)) as engine:
        engine.prepare(ToySet(24), 8)
        given = (ToySet(24), 8) if call == "batches" else (ToySet(24),)
        with pytest.raises(kind, match="num_workers: expected a"):
            made = getattr(engine, call)(*given, num_workers=workers)
            list(made) if call == "batches" else None


# As torch says it, or as it is said where the pipe was noticed first.
LOST = "DataLoader worker .* exited unexpectedly|all [12] to live, got one that exited"


class Broken(ToySet):
    """Its sample 20 fails, or ends the process that loads it."""

    def __init__(self, ends):
        super().__init__(SIZE)
        self.ends = ends

    def __getitem__(self, index):
        if index == 20 and self.ends:
            os._exit(3)
        if index == 20:
            raise OSError("sample 20 cannot be read")
        return super().__getitem__(index)


class Gone(ToySet):
    def __getitem__(self, index):
        raise EOFError("the end of the samples' file")


def test_an_error_of_the_samples_is_no_lost_process():
    with make_engine(freeze=schedule(0)) as engine:
        engine.prepare(ToySet(24), 8)
        with pytest.raises(EOFError, match="the end of the samples' file"):
            engine.evaluate(Gone(SIZE), num_workers=1)


@pytest.mark.parametrize(
    ("workers", "ends", "kind", "text"),
    [
        (0, False, OSError, "sample 20 cannot be read"),
        (2, False, OSError, "sample 20 cannot be read"),
        (1, True, RuntimeError, LOST),
        (2, True, RuntimeError, LOST),
    ],
)
def test_what_a_sample_raises_comes_out_and_the_next_evaluation_works(
    workers, ends, kind, text
):
    with make_engine(freeze=schedule(0)) as engine:
        engine.prepare(ToySet(24), 8)
        with pytest.raises(kind, match=text):
            engine.evaluate(Broken(ends), num_workers=workers)
        gc.collect()  # the error holds what has raised it
        assert not multiprocessing.active_children(), "loader processes are left"
        assert engine.evaluate(ToySet(SIZE), num_workers=workers)["loss"] > 0
