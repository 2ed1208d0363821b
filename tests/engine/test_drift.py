"""Frozen layers that keep their records from being found again are warned of, once."""

import logging

import pytest
from torch import nn

import pipetransformer as pt
from pipetransformer.replica.drift import Drift
from tests.engine.scenario import config, make_engine, schedule
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet


@pytest.mark.parametrize(
    ("passes", "views", "warns"),
    [
        ([8, 8], 1, True),
        ([9, 7, 8], 1, True),
        ([8, 0, 8, 0], 1, False),  # not in a row
        ([8, 2], 1, False),  # what is left of an older boundary
        ([1, 1, 1], 1, False),
        ([0, 8], 1, False),  # a first pass of this boundary
        ([8, 8, 8], 2, False),
        ([8, 8, 8, 8], 2, True),
    ],
)
def test_records_of_others_in_passes_without_a_change_here(
    caplog, passes, views, warns
):
    drift, stale, asked = Drift([nn.Linear(2, 2)]), 0, 0
    drift.begin_pass([1, 2], (0, 0), views)
    for found in passes:
        stale, asked = stale + found, asked + 16
        drift.begin_pass([1, 2], (stale, asked), views)
    assert ("another replica's differ" in caplog.text) is warns
    for again in range(1, 9):
        drift.begin_pass([1, 2], (stale + 8 * again, asked + 16 * again), views)
    assert caplog.text.count("another replica's differ") == 1


def test_a_boundary_that_moves_is_no_sign_of_others(caplog):
    drift = Drift([nn.Linear(2, 2)])
    for number in range(6):
        drift.begin_pass([number], (8 * number, 16 * number))
    assert "another replica's differ" not in caplog.text


def train(rank, differs):
    told = []

    class Keeps(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    logging.getLogger("pipetransformer").addHandler(Keeps())
    engine = make_engine(
        freeze=schedule(2),
        config=config(
            cache=pt.CacheConfig(admission="always"),
            plan=pt.PlanConfig(num_stages=1, replicas="all"),
        ),
    )
    with engine:
        for epoch in engine.epochs(8):
            for batch in engine.batches(ToySet(48), 12):
                if differs and epoch == 1 and rank == 0:
                    model_of(engine)[0].note = "saved by the lead"
                engine.step(batch)
    return [text for text in told if "another replica's differ" in text]


@pytest.mark.distributed
@pytest.mark.parametrize("differs", [False, True])
def test_an_attribute_that_one_rank_alone_sets_is_found_out(differs):
    found = run_ranks(train, 2, differs)
    assert any(found) is differs
