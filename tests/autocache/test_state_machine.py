"""Random sequences of operations against a dict that does the same."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pipetransformer.autocache import ActivationCache

from .test_cache import make_cache, merged

NUM_SAMPLES = 12
NUM_SLOTS = 8
ids_of_a_batch = st.lists(st.integers(0, NUM_SAMPLES - 1), max_size=10)


class CacheMachine(RuleBasedStateMachine):
    """Model: sample -> (boundary, fingerprint, input hash or None, value)."""

    room = NUM_SLOTS  # for samples
    options = {}

    def __init__(self):
        super().__init__()
        first = make_cache(
            num_samples=NUM_SAMPLES, num_slots=NUM_SLOTS, slot_bytes=1024
        )
        assert first.num_slots == NUM_SLOTS
        self.add_tiers(first)
        second = ActivationCache.attach(first.address, run_id="run", **self.options)
        self.caches = [first, second]
        self.chain = [0, 0, 0, 0, 0]
        self.inputs = [0] * NUM_SAMPLES
        self.model = {}
        self.owners = set()
        self.written = 0

    def add_tiers(self, cache):
        """Give the cache what else it has, before others attach."""

    @rule(
        ids=ids_of_a_batch,
        boundary=st.integers(0, 4),
        width=st.integers(0, 3),
        hashed=st.booleans(),
        who=st.integers(0, 1),
    )
    def store(self, ids, boundary, width, hashed, who):
        self.written += 1
        x = torch.full((len(ids), width), float(self.written))
        hashes = self.hashes(ids) if hashed else None
        stored = self.caches[who].store(
            torch.tensor(ids, dtype=torch.int64),
            (x, torch.full((len(ids),), self.written)),
            boundary=boundary,
            fingerprint=self.chain[boundary],
            input_hashes=hashes,
        )
        expected = 0
        for row, sample in enumerate(ids):
            if sample not in self.owners:
                if len(self.owners) == self.room:
                    continue
                self.owners.add(sample)
            key = (boundary, self.chain[boundary])
            key += (int(hashes[row]) if hashed else None,)
            if sample in self.model and self.model[sample][:3] == key:
                continue
            self.model[sample] = (*key, self.written, width)
            expected += 1
        assert stored == expected

    @rule(
        ids=ids_of_a_batch,
        boundary=st.integers(0, 4),
        hashed=st.booleans(),
        who=st.integers(0, 1),
    )
    def fetch(self, ids, boundary, hashed, who):
        groups = self.caches[who].fetch(
            torch.tensor(ids, dtype=torch.int64),
            chain=self.chain[: boundary + 1],
            input_hashes=self.hashes(ids) if hashed else None,
        )
        found = merged(groups, len(ids))
        expected = {}
        for row, sample in enumerate(ids):
            at, fingerprint, of_input, value, width = self.model.get(
                sample, (99, 0, 0, 0, 0)
            )
            if at > boundary or self.chain[at] != fingerprint:
                continue
            if hashed and of_input != self.inputs[sample]:
                continue
            expected[row] = (at, value, width)
        got = {
            row: (at, int(scalar), len(x)) for row, (at, (x, scalar)) in found.items()
        }
        assert got == expected

    @rule(layer=st.integers(1, 4))
    def change_weights(self, layer):
        for boundary in range(layer, 5):
            self.chain[boundary] += 1

    @rule(sample=st.integers(0, NUM_SAMPLES - 1))
    def change_input(self, sample):
        self.inputs[sample] += 1

    @rule(who=st.integers(0, 1))
    def reopen(self, who):
        self.caches[who].close()
        address = self.caches[1 - who].address
        self.caches[who] = ActivationCache.attach(address, run_id="run", **self.options)

    @invariant()
    def counts_add_up(self):
        for cache in self.caches:
            counts = cache.counters
            assert counts.stale <= counts.misses
            assert counts.corrupt == 0

    def teardown(self):
        for cache in self.caches:
            cache.close()

    def hashes(self, ids):
        return torch.tensor([self.inputs[i] for i in ids], dtype=torch.int64)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=30
)
