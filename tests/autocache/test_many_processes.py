"""Many processes on one slab: whatever they do at once, what is served is right."""

import multiprocessing
import random

import pytest
import torch

from pipetransformer.autocache import ActivationCache, Ragged, record_bytes
from pipetransformer.data.sampler import ElasticSampler

from .test_cache import make_cache, values

FORK = multiprocessing.get_context("fork")
WAIT_S = 60
SAMPLES, LONGEST, WIDTH = 24, 40, 32
BOUNDARIES, WEIGHTS, INPUTS = 3, 3, 2
RAGGED = Ragged(lambda inputs: inputs, fill=-1.0)


def run_all(count, work, *arguments):
    """Run ``work(index, *arguments, queue)`` in processes; return what each puts."""
    queue = FORK.Queue()
    processes = [
        FORK.Process(target=work, args=(index, *arguments, queue), daemon=True)
        for index in range(count)
    ]
    for process in processes:
        process.start()
    try:
        found = [queue.get(timeout=WAIT_S) for _ in processes]
    finally:
        for process in processes:
            process.join(WAIT_S)
            process.kill()
    assert [process.exitcode for process in processes] == [0] * count
    return [result for _, result in sorted(found)]


# --- two processes that read and write anything ---------------------------------


def length_of(sample, boundary):
    return 1 + (7 * sample + 11 * boundary) % LONGEST


def record(sample, boundary, weights, inputs):
    """The only right value of a key; its length goes by sample and boundary."""
    first = 1 + inputs + INPUTS * (weights + WEIGHTS * (boundary + 8 * sample))
    length = length_of(sample, boundary)
    return first + torch.arange(length * WIDTH).view(length, WIDTH) / 4096


RECORDS = {
    (sample, boundary, weights, inputs): record(sample, boundary, weights, inputs)
    for sample in range(SAMPLES)
    for boundary in range(1, BOUNDARIES + 1)
    for weights in range(WEIGHTS)
    for inputs in range(INPUTS)
}


def use_at_random(index, address, ragged, rounds, barrier, queue):
    """Store and fetch; count what was found, fail at what is not as it should be."""
    torch.set_num_threads(1)
    draw = random.Random(index)
    cache = ActivationCache.attach(address, run_id="run", verify="all")
    barrier.wait(WAIT_S)
    for _ in range(rounds):
        boundary = draw.randint(1, BOUNDARIES)
        ids = [draw.randrange(SAMPLES) for _ in range(draw.randint(1, 6))]
        inputs = [draw.randrange(INPUTS) for _ in ids]
        # Of each boundary; a fingerprint names the weights.
        weights = [draw.randrange(WEIGHTS) for _ in range(BOUNDARIES + 1)]
        hashes = torch.tensor(inputs)
        if draw.random() < 0.4:
            found = cache.fetch(
                torch.tensor(ids),
                chain=weights,
                input_hashes=hashes,
                ragged=RAGGED if ragged else None,
            )
            for group in found:
                (tensor,) = group.tensors
                for k, row in enumerate(group.rows.tolist()):
                    at = group.boundary
                    right = RECORDS[ids[row], at, weights[at], inputs[row]]
                    assert torch.equal(tensor[k, : len(right)], right)
                    assert (tensor[k, len(right) :] == -1).all()
            continue
        rows = [
            RECORDS[sample, boundary, weights[boundary], inputs[k]]
            for k, sample in enumerate(ids)
        ]
        if ragged:
            batch = torch.zeros(len(ids), LONGEST, WIDTH)
            for k, row in enumerate(rows):
                batch[k, : len(row)] = row
            cache.store(
                torch.tensor(ids),
                (batch,),
                boundary=boundary,
                fingerprint=weights[boundary],
                input_hashes=hashes,
                ragged=RAGGED,
                lengths=torch.tensor([len(row) for row in rows]),
            )
        else:
            for k, row in enumerate(rows):  # each of a shape of its own
                cache.store(
                    torch.tensor(ids[k : k + 1]),
                    (row[None],),
                    boundary=boundary,
                    fingerprint=weights[boundary],
                    input_hashes=hashes[k : k + 1],
                )
    queue.put((index, cache.counters))


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_two_processes_that_read_and_write_at_random_are_served_nothing_wrong(ragged):
    slot_bytes = record_bytes([torch.zeros(1, LONGEST, WIDTH)])
    cache = make_cache(
        num_samples=SAMPLES, slot_bytes=slot_bytes, num_slots=2 * SAMPLES, ragged=ragged
    )
    barrier = FORK.Barrier(2)
    both = run_all(2, use_at_random, cache.address, ragged, 2500, barrier)
    for counts in both:
        assert counts.hits > 200 and counts.stored > 1000
        assert counts.corrupt == 0
        assert counts.stale > 0 and counts.changed > 0


# --- replicas that divide the set anew in each pass ------------------------------

REPLICAS, EPOCHS, SET, BATCH = 8, 100, 60, 13
ADVANCE_AT = 50  # epoch from which the boundary is 2
CHAIN = [10, 11, 12]


def replicas_in(epoch):
    return random.Random(epoch).randint(1, REPLICAS) if epoch else REPLICAS


def train_passes(index, address, barrier, queue):
    """Read this replica's shares of all passes, as a frozen prefix does."""
    torch.set_num_threads(1)
    cache = ActivationCache.attach(address, run_id="run", verify="all")
    sampler = ElasticSampler(SET, BATCH, seed=1)
    seen = []
    for epoch in range(EPOCHS + 1):
        active = replicas_in(epoch)
        boundary = 1 if epoch < ADVANCE_AT else 2
        sampler.set_epoch(epoch)
        before = cache.counters
        read = []
        if index < active:
            sampler.set_replica(replicas_on_node=active, replica_on_node=index)
            for share in sampler:
                ids = torch.tensor(share, dtype=torch.int64)
                found = cache.fetch(ids, chain=CHAIN[: boundary + 1])
                current = torch.zeros(len(ids), dtype=torch.bool)
                for group in found:
                    got = values(ids[group.rows], group.boundary)
                    assert torch.equal(group.tensors[0], got)
                    if group.boundary == boundary:
                        current[group.rows] = True
                rest = ids[~current]
                if len(rest):
                    cache.store(
                        rest,
                        (values(rest, boundary),),
                        boundary=boundary,
                        fingerprint=CHAIN[boundary],
                    )
                read += share
        now = cache.counters
        counts = (now.hits - before.hits, now.misses - before.misses)
        seen.append((read, *counts, now.stored - before.stored))
        if epoch in (0, ADVANCE_AT - 1, ADVANCE_AT):
            barrier.wait(WAIT_S)  # as a change of plan does
    queue.put((index, seen))


def test_replicas_that_are_divided_anew_a_hundred_times_find_every_sample_once():
    cache = make_cache(num_samples=SET, slot_bytes=512)
    barrier = FORK.Barrier(REPLICAS)
    by_replica = run_all(REPLICAS, train_passes, cache.address, barrier)
    used = set()
    for epoch in range(EPOCHS + 1):
        shares = [seen[epoch] for seen in by_replica]
        read = sorted(sample for ids, *_ in shares for sample in ids)
        assert read == list(range(SET)), "each sample once in a pass"
        hits, misses, stored = (sum(share[k] for share in shares) for k in (1, 2, 3))
        assert (hits, misses) == ((SET, 0) if epoch else (0, SET))
        assert stored == (SET if epoch in (0, ADVANCE_AT) else 0)
        used |= {index for index, (ids, *_) in enumerate(shares) if ids}
    assert used == set(range(REPLICAS))
    assert cache.used_bytes == SET * cache.slot_bytes
