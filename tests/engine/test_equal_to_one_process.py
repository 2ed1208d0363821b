"""Whatever K, R and M: the weights that one process with plain PyTorch calls gives."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import pipetransformer as pt
from pipetransformer.data.loading import ElasticSampler
from tests.engine.scenario import config, is_active
from tests.support.private import model_of
from tests.support.ranks import run_ranks
from tests.support.toy import ToySet, toy_model, toy_units

SAMPLES, BATCH, EPOCHS, SEED = 62, 8, 2, 3
IGNORED = -100


class Marked(ToySet):
    """Targets of which some count for nothing, and for some shares none count."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x, torch.tensor(IGNORED) if i % 3 else y


def counted(targets):
    return (targets != IGNORED).sum()


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings."""

    accumulate: int = 1
    clip: float | None = None
    tokens: bool = False
    amp: str | None = None

    @property
    def dtype(self):
        return torch.float32 if self.amp else torch.float64


CASES = {
    "accumulation": Case(accumulate=3),
    "clipping": Case(clip=0.05),
    "token weights": Case(tokens=True),
    "all three": Case(accumulate=3, clip=0.05, tokens=True),
    "bf16": Case(amp="bf16"),
    "all of it": Case(3, 0.05, True, "bf16"),
}


def data_of(case):
    kind = Marked if case.tokens else ToySet
    return kind(SAMPLES, dtype=case.dtype)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def weights_of(engine):
    return [p.detach().clone() for p in model_of(engine).parameters()]


def train(rank, stages, microbatches, order="gpipe"):
    """Train every case; return weights, (K, R, M) and losses by case."""
    results = {}
    for name, case in CASES.items():
        engine = pt.PipeTransformer(
            toy_model(dtype=case.dtype),
            optimizer=sgd,
            loss=nn.CrossEntropyLoss(),
            loss_weight=counted if case.tokens else None,
            freeze=pt.freeze.Never(),
            units=toy_units(),
            config=config(
                seed=SEED,
                accumulation_steps=case.accumulate,
                clip_grad_norm=case.clip,
                amp=case.amp,
                plan=pt.PlanConfig(num_stages=stages, num_microbatches=microbatches),
                pipe=pt.PipeConfig(num_slots=stages, schedule=order),
            ),
        )
        with engine:
            for _ in engine.epochs(EPOCHS):
                for batch in engine.batches(data_of(case), BATCH):
                    engine.step(batch)
            if is_active(engine):
                plan = engine.plan
                assert plan.schedule == order or plan.num_stages == 1
                shape = plan.num_stages, plan.num_replicas, plan.num_microbatches
                losses = [e.train_loss for e in engine.history.epochs]
                results[name] = weights_of(engine), shape, losses
    return results


def distance(one, other):
    """Return the largest difference of a weight over the largest weight."""
    pairs = list(zip(one, other, strict=True))
    scale = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / scale


def tolerance_of(case):
    """Return how far weights may be from those of one process.

    Gradients of matrix products are rounded to bf16 for each micro-batch: sums over
    other rows have other bits. Both are about as far from fp32.
    """
    if case.amp is None:
        return 1e-12
    whole = dataclasses.replace(case, amp=None)
    return 2 * distance(plain(case)[0], [w.float() for w in plain(whole)[0]])


def plain(case):
    """Train with plain PyTorch calls; return weights and the mean loss by epoch."""
    model, data = toy_model(dtype=case.dtype), data_of(case)
    optimizer, means = sgd(model.parameters()), []
    sampler = ElasticSampler(SAMPLES, BATCH * case.accumulate, seed=SEED)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses, weights = [], []
        for ids in sampler:
            pairs = [data[i] for i in ids]
            inputs, targets = (
                torch.stack(column) for column in zip(*pairs, strict=True)
            )
            weights.append(float(counted(targets)))
            with torch.autocast("cpu", torch.bfloat16, enabled=case.amp is not None):
                total = nn.functional.cross_entropy(
                    model(inputs), targets, reduction="sum"
                )
                loss = total / max(1.0, weights[-1])
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
        pairs = zip(losses, weights, strict=True)
        means.append(sum(a * b for a, b in pairs) / sum(weights))
    return [p.detach() for p in model.parameters()], means


PLANS = [
    ("gpipe", stages, replicas, microbatches)
    for stages, replicas in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
    for microbatches in (1, 2)
] + [
    # The loss is called for each micro-batch, and its backward comes at once.
    (order, stages, replicas, microbatches)
    for order in ("1f1b", "zb-h1")
    for stages, replicas, microbatches in ((1, 1, 2), (2, 1, 4), (2, 2, 2))
]


@pytest.fixture(scope="module")
def reference():
    return {name: (*plain(case), tolerance_of(case)) for name, case in CASES.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("order, stages, replicas, microbatches", PLANS)
def test_weights_and_losses_are_those_of_one_process(
    order, stages, replicas, microbatches, reference
):
    alone = replicas == 1
    found = (
        [train(0, stages, microbatches, order)]
        if alone
        else run_ranks(train, stages * replicas, stages, microbatches, order)
    )
    active = [results for results in found if results]
    for name in CASES:
        weights, losses, tolerance = reference[name]
        for results in active:
            own, shape, means = results[name]
            assert shape == (stages, replicas, microbatches)
            worst = distance(own, weights)
            print(f"K={stages} R={replicas} M={microbatches} {name}: {worst:.1e}")
            assert worst <= tolerance, name
            assert means == pytest.approx(losses, rel=max(1e-12, 10 * tolerance)), name


def test_the_cases_are_different_trainings(reference):
    for one, other in itertools.combinations(["clipping", "token weights"], 2):
        pairs = zip(reference[one][0], reference[other][0], strict=True)
        assert not all(torch.equal(a, b) for a, b in pairs)
