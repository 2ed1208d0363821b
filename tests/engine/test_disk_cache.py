"""A cache most of whose records are on disk: training goes as without a cache."""

import logging

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.autocache import ActivationCache
from tests.engine.scenario import config
from tests.support.private import run_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, accuracy, toy_model

SIZE = 48
EPOCHS = 5
LITTLE = 6500  # bytes of a slab that holds a few records
FROZEN = [2, 2, 3, 3, 1]  # an advance, and an unfreeze


def train(folder, *, stages=1, workers=0, ranks=1, **cache):
    """Return losses, evaluations and the history of a run with a small slab."""
    given = {"disk_directory": folder, "budget_bytes": LITTLE, "audit_every": 5}
    engine = pt.PipeTransformer(
        toy_model(5),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule(FROZEN),
        config=config(
            cache=pt.CacheConfig(**{**given, **cache}),
            pipe=pt.PipeConfig(num_slots=stages),
            plan=pt.PlanConfig(num_stages=stages, num_microbatches=2),
        ),
    )
    losses, found = [], []
    with engine:
        for _ in engine.epochs(EPOCHS):
            for batch in engine.batches(ToySet(SIZE), 12, num_workers=workers):
                losses.append(float(engine.step(batch)))
            found.append(
                engine.evaluate(ToySet(20), {"accuracy": accuracy}, name="val")
            )
        caches = run_of(engine).caches
        slots = min(caches.training().num_slots, SIZE) if caches.training() else 0
        planned = caches.training_room().samples
    return losses, found, engine.history, slots, planned


@pytest.mark.parametrize(
    "options", [{}, {"stages": 2}, {"workers": 1}], ids=["one", "stages", "workers"]
)
def test_losses_and_scores_are_those_without_a_cache(tmp_path, options):
    found = train(tmp_path, **options)
    plain = train(None, enabled=False, **options)
    assert found[:2] == plain[:2]
    history, slots, planned = found[2:]
    assert 0 < slots < SIZE and planned == SIZE
    for counts in history.cache[1:4]:
        assert counts["hits"] + counts["late"] == SIZE
        assert counts["disk_hits"] + counts["late"] == SIZE - slots
        assert counts["disk_bytes"] == (SIZE - slots) * 4096
    assert sum(counts["disk_hits"] for counts in history.cache) > 0
    assert history.cache[0]["full"] == 0


def rank_run(rank, folder):
    losses, found, history, _, _ = train(folder)
    counts = history.cache
    return losses, found, sum(each["disk_hits"] for each in counts)


@pytest.mark.distributed
def test_replicas_share_the_disk_of_their_node(tmp_path):
    outcomes = run_ranks(rank_run, 2, str(tmp_path))
    plain = run_ranks(plain_run, 2)
    for (losses, found, _), expected in zip(outcomes, plain, strict=True):
        assert (losses, found) == expected
    assert outcomes[0][2] > 0


def plain_run(rank):
    return train(None, enabled=False)[:2]


def test_a_folder_that_is_not_there_costs_a_warning(tmp_path, caplog):
    found = train(tmp_path / "none")
    # Batches are served in part: what is missing is computed in other shapes.
    assert found[0] == pytest.approx(train(None, enabled=False)[0], rel=1e-5)
    assert "nothing is kept on disk: " in caplog.text
    assert found[4] == found[3]  # plans do not count on it


def test_the_line_of_an_epoch_tells_hits_on_disk(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        train(tmp_path)
    assert "of them on disk in 0 MB" in caplog.text


def test_batches_to_come_are_asked_for_in_order_and_once(tmp_path, monkeypatch):
    asked, fetched = [], []
    cache = ActivationCache
    prefetch, fetch = cache.prefetch, cache.fetch

    def note(self, ids, view=0):
        asked.append((self.num_samples, sorted(ids)))
        return prefetch(self, ids, view)

    def check(self, ids, **options):
        wanted = set(ids.tolist())
        before = {i for n, ids in asked if n == self.num_samples for i in ids}
        assert wanted <= before
        fetched.append((self.num_samples, sorted(ids.tolist())))
        return fetch(self, ids, **options)

    monkeypatch.setattr(cache, "prefetch", note)
    monkeypatch.setattr(cache, "fetch", check)
    train(tmp_path)
    training = [ids for n, ids in asked if n == SIZE]
    assert training[: SIZE // 12] == [ids for n, ids in fetched if n == SIZE][:4]
    assert len(training) == EPOCHS * SIZE // 12
