"""A bit that flips anywhere in the slab: no reader is served another value, or ends."""

import json
import multiprocessing
import os
import random
import struct

import pytest
import torch

from pipetransformer.autocache import ActivationCache, Ragged

from .test_cache import make_cache

FLIPS = 1000
WAIT_S = 100
SAMPLES, LONGEST, WIDTH = 24, 12, 8
IDS = torch.arange(SAMPLES)
RAGGED = Ragged(lambda inputs: inputs, fill=-1.0)
SLOT_BYTES = 832
INDEX = 4096
SLOTS = INDEX + 64 * (SAMPLES * 8 // 64)
HEADER_BYTES = 240  # with the version in front


def lengths(ragged):
    return 1 + 5 * IDS % LONGEST if ragged else torch.full((SAMPLES,), LONGEST)


def rows(boundary):
    first = 100 * IDS[:, None, None] + boundary
    return first + torch.arange(LONGEST * WIDTH).view(LONGEST, WIDTH) / 128


def store(cache, ragged, boundary=1):
    options = {"ragged": RAGGED, "lengths": lengths(True)} if ragged else {}
    return cache.store(
        IDS, (rows(boundary),), boundary=boundary, fingerprint=boundary, **options
    )


def right_values(boundary, ragged):
    behind = torch.arange(LONGEST) >= lengths(ragged)[:, None]
    return rows(boundary).masked_fill(behind[..., None], -1.0)


RIGHT = {
    ragged: {boundary: right_values(boundary, ragged) for boundary in (1, 2)}
    for ragged in (False, True)
}


def served(cache, ragged):
    """Samples that are found; each has its value, and the fill behind its end."""
    found = cache.fetch(
        IDS, chain=[0, 1, 2], ragged=RAGGED if ragged else None, length=LONGEST
    )
    samples = set()
    for group in found:
        right = RIGHT[ragged][group.boundary][group.rows]
        assert torch.equal(group.tensors[0], right)
        samples |= set(group.rows.tolist())
    return samples


def places_of(parts, begin, draw):
    """Bytes of a part of the slab, without end."""
    while True:
        start, size = draw.choice(parts)
        yield begin + start + draw.randrange(size)


def regions(fd, draw):
    """Endless places within each kind of what the slab consists of."""
    entries = struct.unpack(f"<{SAMPLES}Q", os.pread(fd, 8 * SAMPLES, INDEX))
    slots = [(entry % 2**37 * 64, entry >> 37 << 6) for entry in entries]
    headers = [(begin, HEADER_BYTES) for begin, _ in slots]
    payloads = [(begin + HEADER_BYTES, size - HEADER_BYTES) for begin, size in slots]
    return {
        "superblock": places_of([(0, 384)], 0, draw),
        "index": places_of([(0, 8 * SAMPLES)], INDEX, draw),
        "headers": places_of(headers, SLOTS, draw),
        "payloads": places_of(payloads, SLOTS, draw),
    }


def attached(address):
    try:
        return ActivationCache.attach(address, run_id="run", verify="all")
    except ValueError:
        return None


def flip_and_read(ragged, results):
    cache = make_cache(
        num_samples=SAMPLES, slot_bytes=SLOT_BYTES, verify="all", ragged=ragged
    )
    assert store(cache, ragged) == SAMPLES
    fd, draw = json.loads(cache.address)["fd"], random.Random(0)
    whole = os.pread(fd, os.fstat(fd).st_size, 0)
    seen = {"refused": 0}
    for _ in range(FLIPS // 4):
        for region, places in regions(fd, draw).items():
            place = next(places)
            os.pwrite(fd, bytes([whole[place] ^ 1 << draw.randrange(8)]), place)
            late = attached(cache.address)
            seen["refused"] += late is None
            for reader in (cache, late):
                if reader is None:
                    continue
                found = served(reader, ragged)
                # An index word may lead to the slot of another sample, too.
                assert len(found) >= SAMPLES - 2
                seen[region] = seen.get(region, 0) + (len(found) < SAMPLES)
            # What misses is computed and stored again, and all advance.
            for boundary in (1, 2):
                store(cache, ragged, boundary)
                served(cache, ragged)
            if late is not None:
                served(late, ragged)
                late.close()
            os.pwrite(fd, whole, 0)
            assert served(cache, ragged) == set(range(SAMPLES))
    results.put(seen)


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_none_of_a_thousand_flipped_bits_is_served(ragged):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=flip_and_read, args=(ragged, results), daemon=True)
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0, "no reader ends"
    seen = results.get(timeout=WAIT_S)
    # The flips did something, and where they should.
    assert seen["refused"] > 10
    assert all(seen[region] > 100 for region in ("index", "headers", "payloads"))
