"""`CacheConfig.debug` where frozen layers are in chunks on several devices.

Each run is in a process of its own: the device is registered for good.
"""

import pytest
import torch
from torch import nn

import pipetransformer as pt
from tests.engine.scenario import config
from tests.engine.test_cache_debug import AlwaysDropout, Mixing
from tests.engine.test_cached_structures import Hand, Take
from tests.support.device_ranks import MARKS, NODE, pretend
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model

pytestmark = MARKS

SIZE, BATCH, FROZEN = 24, 12, 4


def fixed():
    return torch.tensor(2.0)


def train(_rank, libraries, layer, debug=True, changes=None, hands_on=False):
    """Train with frozen layers on two devices; return what came, or the error."""
    fake = pretend(libraries)
    toy = list(toy_model(3))
    if hands_on:
        layer, toy[3] = Hand(layer, fixed), Take(toy[3])
    engine = pt.PipeTransformer(
        nn.Sequential(*toy[:3], layer, *toy[3:]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        loss=nn.CrossEntropyLoss(),
        freeze=pt.freeze.Schedule([FROZEN]),
        config=config(
            cache=pt.CacheConfig(debug=debug),
            pipe=pt.PipeConfig(num_slots=2),
            plan=pt.PlanConfig(num_stages=2, num_microbatches=2, prefix="pipelined"),
            devices=NODE[:2],
        ),
    )
    losses, places, error = [], [], None
    try:
        with engine:
            for epoch in engine.epochs(3):
                for batch in engine.batches(ToySet(SIZE), BATCH):
                    if (epoch, batch.index) == (1, 1) and changes is not None:
                        with torch.no_grad():
                            model_of(engine)[changes].up.weight.mul_(2.0)
                    losses.append(float(engine.step(batch)))
                    frozen = model_of(engine)[:FROZEN].parameters()
                    places.append({str(p.device) for p in frozen})
    except ValueError as raised:
        error = str(raised)
    fake.synchronize()
    return losses, places, engine.history.cache, error, fake.violations()


@pytest.mark.parametrize("hands_on", [False, True])
def test_a_clean_model_trains_with_the_same_losses(libraries, hands_on):
    ((losses, places, cache, error, violations),) = run_ranks(
        train, 1, libraries, nn.Tanh(), True, None, hands_on
    )
    assert (error, violations) == (None, [])
    assert all(place == set(NODE[:2]) for place in places)  # chunks that never rest
    assert [(each["hits"], each["audited"]) for each in cache] == [
        (0, 0),
        (SIZE, SIZE),
        (SIZE, SIZE),
    ]
    ((plain, *_, violations),) = run_ranks(
        train, 1, libraries, nn.Tanh(), False, None, hands_on
    )
    assert losses == plain and violations == []


@pytest.mark.parametrize(
    ("layer", "changes", "text"),
    [
        (AlwaysDropout(), None, "layer 3 (AlwaysDropout) gives a batch other values"),
        (Mixing(), None, "layer 3 (Mixing) gives a row other values alone"),
        (nn.Tanh(), 1, "layer 1 was changed after the pass had begun"),  # first chunk
        (nn.Tanh(), 2, "layer 2 was changed after the pass had begun"),
    ],
)
def test_the_fault_is_named_in_every_chunk(libraries, layer, changes, text):
    ((losses, places, _, error, violations),) = run_ranks(
        train, 1, libraries, layer, True, changes
    )
    assert f"computed again at boundary {FROZEN} as it is in the cache" in error
    assert text in error and violations == []
    assert places[0] == set(NODE[:2]) and len(losses) < 3 * SIZE // BATCH
