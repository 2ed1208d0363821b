import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    IterableDataset,
    Subset,
    default_collate,
)

import pipetransformer as pt
from pipetransformer.data.loading import ElasticSampler, batches
from tests.engine.scenario import config


class Squares:
    """Samples (index as a row of two, index squared); counts what is loaded."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index * index


class Halves(Squares):
    def __init__(self, size):
        super().__init__(size)
        self.loaded = []

    def inputs(self, index):
        self.loaded.append(index)
        return self[index][0]

    def targets(self, index):
        return self[index][1]

    def input_key(self, index, epoch):
        return 2**63 + 10 * index + epoch


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def global_batches(num_samples, batch_size, *, replicas, epoch=0, position=0, **kw):
    """Per node and replica lists, joined to one list of ids per global batch."""
    joined = None
    for node, count in enumerate(replicas):
        for replica in range(count):
            sampler = ElasticSampler(
                num_samples,
                batch_size,
                num_nodes=len(replicas),
                node=node,
                replicas_on_node=count,
                replica_on_node=replica,
                **kw,
            )
            sampler.set_epoch(epoch)
            sampler.set_position(position)
            lists = list(sampler)
            assert len(lists) == len(sampler)
            joined = joined or [[] for _ in lists]
            for batch, ids in zip(joined, lists, strict=True):
                batch.append(ids)
    return joined


sizes = st.integers(1, 60)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 4), st.data())
def test_batches_are_the_same_for_every_number_of_replicas(rows, batch, nodes, data):
    replicas = data.draw(st.lists(st.integers(1, 5), min_size=nodes, max_size=nodes))
    same = {"epoch": data.draw(st.integers(0, 3)), "by_home": data.draw(st.booleans())}
    alone = global_batches(rows, batch, replicas=[1] * nodes, **same)
    split = global_batches(rows, batch, replicas=replicas, **same)
    assert [sum(b, []) for b in split] == [sum(b, []) for b in alone]


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.booleans())
def test_epoch_has_every_sample_once_in_even_shares(
    rows, batch, nodes, count, drop, by_home
):
    split = global_batches(
        rows, batch, replicas=[count] * nodes, drop_last=drop, by_home=by_home
    )
    seen = [i for shares in split for share in shares for i in share]
    assert len(seen) == len(set(seen))
    if not drop:
        assert sorted(seen) == list(range(rows))
    for number, shares in enumerate(split):
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= 1
        short = number == rows // batch
        assert sum(counts) == (rows % batch if short else batch)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 4), st.integers(1, 5), st.data())
def test_other_nodes_can_finish_a_pass(rows, batch, nodes, replicas, data):
    epoch = data.draw(st.integers(0, 3))
    position = data.draw(st.integers(0, -(-rows // batch)))
    begun = global_batches(rows, batch, replicas=[1] * nodes, epoch=epoch)
    shares = []
    for replica in range(replicas):
        sampler = ElasticSampler(
            rows,
            batch,
            num_nodes=nodes,
            node=None,
            replicas_on_node=replicas,
            replica_on_node=replica,
        )
        sampler.set_epoch(epoch)
        sampler.set_position(position)
        shares.append(list(sampler))
    finished = [sum(parts, []) for parts in zip(*shares, strict=True)]
    assert finished == [sum(b, []) for b in begun[position:]]


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 5), st.integers(1, 4))
def test_shares_have_as_many_rows_as_asked_for_or_none(rows, batch, replicas, least):
    shares = [
        list(
            ElasticSampler(
                rows,
                batch,
                replicas_on_node=replicas,
                replica_on_node=replica,
                min_rows=least,
            )
        )
        for replica in range(replicas)
    ]
    whole = list(ElasticSampler(rows, batch))
    for parts, ids in zip(zip(*shares, strict=True), whole, strict=True):
        assert sum(parts, []) == ids
        counts = [len(part) for part in parts]
        if len(ids) >= least > 1:
            assert all(count == 0 or count >= least for count in counts)
            assert sum(map(bool, counts)) == min(replicas, len(ids) // least)
        if len(ids) < least:
            assert counts[0] == len(ids)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 3), st.integers(0, 3))
def test_homes_change_the_order_of_rows_and_no_batch(rows, batch, nodes, epoch):
    of = {"replicas": [1] * nodes, "epoch": epoch}
    plain = global_batches(rows, batch, **of)
    homed = global_batches(rows, batch, **of, by_home=True)
    assert [list(map(sorted, b)) for b in homed] == [
        list(map(sorted, b)) for b in plain
    ]


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_replica_at_home_takes_much_the_same_samples(replicas):
    def kept(by_home):
        """Return the share of samples that the replica before takes again."""
        taken = []
        for epoch in range(2):
            split = global_batches(
                4096, 64, replicas=[replicas], epoch=epoch, by_home=by_home
            )
            taken.append({i: n for b in split for n, ids in enumerate(b) for i in ids})
        before, after = taken
        return sum(before[i] == after[i] for i in after) / len(after)

    assert kept(by_home=False) == pytest.approx(1 / replicas, abs=0.05)
    assert kept(by_home=True) > {2: 0.9, 4: 0.8, 8: 0.55}[replicas]


def test_order_is_fresh_each_epoch_and_repeats_with_its_seed():
    orders = [
        tuple(sum(sum(global_batches(64, 8, replicas=[2], epoch=e, seed=s), []), []))
        for s in (1, 2)
        for e in range(4)
    ]
    assert len(set(orders)) == len(orders)
    again = global_batches(64, 8, replicas=[2], epoch=2, seed=1)
    assert tuple(sum(sum(again, []), [])) == orders[2]


def test_samples_stay_with_their_node_over_epochs():
    owned = []
    for epoch in range(3):
        split = global_batches(41, 8, replicas=[1, 1, 1], epoch=epoch)
        owned.append([sorted(sum((b[n] for b in split), [])) for n in range(3)])
    assert owned[0] == owned[1] == owned[2]
    assert owned[0][0] != list(range(0, 14))


@given(st.integers(0, 5))
def test_position_resumes_within_the_epoch(position):
    whole = global_batches(37, 8, replicas=[2, 1], epoch=3)
    rest = global_batches(37, 8, replicas=[2, 1], epoch=3, position=position)
    assert (rest or []) == whole[position:]


def test_setters_do_not_change_a_pass_that_began():
    sampler = ElasticSampler(20, 4)
    expected, running = list(sampler), iter(sampler)
    sampler.set_epoch(1)
    sampler.set_replica(replicas_on_node=2, replica_on_node=1)
    assert list(running) == expected
    assert [len(ids) for ids in sampler] == [2] * 5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(num_samples=0), "num_samples: expected a number >= 1, got 0"),
        (dict(batch_size=-1), "batch_size: expected a number >= 1, got -1"),
        (dict(num_nodes=2, node=2), r"node: expected a number in 0\.\.1 .* got 2"),
        (dict(replica_on_node=1), r"replica_on_node: expected .* 0\.\.0 .* got 1"),
    ],
)
def test_sampler_refuses_arguments_out_of_range(arguments, text):
    with pytest.raises(ValueError, match=text):
        ElasticSampler(**{"num_samples": 8, "batch_size": 2, **arguments})


def test_sampler_refuses_epoch_and_position_out_of_range():
    sampler = ElasticSampler(8, 2)
    with pytest.raises(ValueError, match="epoch: expected a number >= 0, got -1"):
        sampler.set_epoch(-1)
    with pytest.raises(ValueError, match=r"position: .* in 0\.\.4, got 5"):
        sampler.set_position(5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_carry_ids_rows_and_numbers(num_workers):
    sampler = ElasticSampler(11, 4, replicas_on_node=2, replica_on_node=0)
    sampler.set_position(1)
    loaded = list(batches(Squares(11), sampler, num_workers=num_workers))
    assert [b.ids.tolist() for b in loaded] == list(sampler)
    assert [b.index for b in loaded] == [1, 2]
    assert [b.global_rows for b in loaded] == [4, 3]
    for batch in loaded:
        assert batch.ids.dtype == torch.int64
        assert batch.rows == len(batch.ids)
        assert torch.equal(batch.inputs, batch.ids[:, None].expand(-1, 2).float())
        assert torch.equal(batch.targets, batch.ids**2)
        assert batch.input_keys is None


@pytest.mark.parametrize("dataset", [Squares(5), Halves(5)])
def test_empty_share_keeps_trailing_shapes(dataset):
    sampler = ElasticSampler(5, 4, replicas_on_node=2, replica_on_node=1)
    last = list(batches(dataset, sampler))[-1]
    assert (last.rows, last.global_rows) == (0, 1)
    assert last.inputs.shape == (0, 2) and last.inputs.dtype == torch.float32
    assert last.targets.shape == (0,) and last.targets.dtype == torch.int64


@pytest.mark.parametrize(("rows", "counts"), [(1, [1, 0, 0]), (2, [1, 1, 0])])
def test_a_nodes_first_replicas_have_the_rows_of_a_short_batch(rows, counts):
    samplers = [
        ElasticSampler(4 + rows, 4, replicas_on_node=3, replica_on_node=i)
        for i in range(3)
    ]
    assert [list(each.shares())[-1].numel() for each in samplers] == counts


def test_empty_share_of_nested_samples_keeps_the_tree():
    def collate(samples):
        tree = default_collate([{"a": (x, x), "b": x} for x, _ in samples])
        return tree, [default_collate([y for _, y in samples])]

    sampler = ElasticSampler(1, 1, replicas_on_node=2, replica_on_node=1)
    (batch,) = batches(Squares(1), sampler, collate_fn=collate)
    assert [t.shape for t in batch.inputs["a"]] == [(0, 2), (0, 2)]
    assert batch.inputs["b"].shape == (0, 2)
    assert batch.targets[0].shape == (0,)


def test_lazy_inputs_are_loaded_once_when_touched():
    dataset = Halves(6)
    first, second = batches(dataset, ElasticSampler(6, 3))
    assert dataset.loaded == []
    assert torch.equal(second.targets, second.ids**2)
    assert torch.equal(second.inputs[:, 0], second.ids.float())
    assert second.inputs is second.inputs
    assert dataset.loaded == second.ids.tolist()
    assert torch.equal(first.input_keys, first.ids * 10 - 2**63)


def test_input_keys_name_the_epoch():
    sampler = ElasticSampler(4, 4)
    sampler.set_epoch(3)
    (batch,) = batches(Halves(4), sampler)
    assert torch.equal(batch.input_keys - batch.ids * 10, torch.full((4,), 3 - 2**63))


def test_loading_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(batches(Squares(6), ElasticSampler(6, 3)))
    assert torch.equal(torch.get_rng_state(), before)


def test_iterable_or_unsized_dataset_is_a_type_error():
    sampler = ElasticSampler(3, 1)
    with pytest.raises(TypeError, match="expected a map-style dataset.*iterable.*Stre"):
        batches(Stream(), sampler)
    with pytest.raises(TypeError, match="expected a map-style dataset.*got generator"):
        batches((i for i in range(3)), sampler)


def test_mismatches_are_named():
    sampler = ElasticSampler(3, 1)
    with pytest.raises(ValueError, match="sampler: expected the 4 samples.*got 3"):
        batches(Squares(4), sampler)
    with pytest.raises(TypeError, match="expected .inputs, targets. pairs.*Tensor"):
        next(batches(torch.zeros(3, 2), sampler))
    with pytest.raises(ValueError, match=r"inputs: expected 1 rows.*shape \(2,\)"):
        doubled = lambda s: (torch.zeros(2), torch.zeros(1))  # noqa: E731
        _ = next(batches(Squares(3), sampler, collate_fn=doubled)).inputs


class Ending(Squares):
    """One of its samples ends an iterator that it reads."""

    def __getitem__(self, index):
        return next(iter(())) if index == 5 else super().__getitem__(index)


class EndingHalves(Halves):
    def targets(self, index):
        return next(iter(())) if index == 5 else super().targets(index)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Ending, EndingHalves])
def test_a_sample_that_ends_an_iterator_does_not_end_the_pass(kind, num_workers):
    loaded = batches(kind(8), ElasticSampler(8, 4), num_workers=num_workers)
    text = f"{kind.__name__}: expected sample 5, got StopIteration"
    with pytest.raises(RuntimeError, match=text):
        list(loaded)


def test_a_collate_function_that_ends_an_iterator_does_not_end_the_pass():
    loaded = batches(
        Squares(8), ElasticSampler(8, 4), collate_fn=lambda samples: next(iter(()))
    )
    text = "collate_fn: expected a batch of 4 samples, got StopIteration"
    with pytest.raises(RuntimeError, match=text):
        list(loaded)


class Named(torch.nn.Module):
    """Reads a text beside each row."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, name):
        lengths = [float(len(text)) for _, text in zip(x, name, strict=False)]
        return self.linear(x) * torch.tensor(lengths)[:, None]


def trained_with_names(**plan):
    torch.manual_seed(0)
    data = [
        ({"x": torch.randn(4), "name": "n" * (1 + i % 5)}, i % 2) for i in range(24)
    ]
    engine = pt.PipeTransformer(
        torch.nn.Sequential(Named(), torch.nn.Linear(4, 2)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=torch.nn.functional.cross_entropy,
        freeze=pt.freeze.Never(),
        config=config(plan=pt.PlanConfig(**plan), pipe=pt.PipeConfig(num_slots=2)),
    )
    with engine:
        for _ in engine.epochs(2):
            for batch in engine.batches(data, 12):
                engine.step(batch)
        return engine.plan, engine.state_dict()


def test_a_batch_with_a_text_for_each_row_stays_whole(caplog):
    _, plain = trained_with_names(num_stages=1, num_microbatches=1)
    plan, weights = trained_with_names(num_stages=2)
    assert plan.shape[:3] == (2, 1, 1)
    assert all(map(torch.equal, plain.values(), weights.values()))
    assert "got a list with a text for each row" in caplog.text
    with pytest.raises(TypeError, match="a text for each row"):
        trained_with_names(num_microbatches=2)


class Several(Squares):
    """Gives several samples at once, as sets on disk do."""

    def __init__(self, size):
        super().__init__(size)
        self.asked = []

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [super(Several, self).__getitem__(i) for i in indices]


class Shifted(Several):
    """Makes something else of each sample, which its base does not know."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 1, y


class TooFew(Several):
    def __getitems__(self, indices):
        return super().__getitems__(indices)[1:]


def inputs_of(dataset):
    loaded = batches(dataset, ElasticSampler(11, 4))
    return [batch.inputs.tolist() for batch in loaded]


def test_samples_come_several_at_once_where_the_dataset_gives_them():
    dataset = Several(11)
    assert inputs_of(dataset) == inputs_of(Squares(11))
    assert [len(ids) for ids in dataset.asked] == [4, 4, 3]


def test_a_class_that_changes_single_samples_is_asked_for_these():
    dataset, plain = Shifted(11), Squares(11)
    plain_inputs = torch.tensor(sum(inputs_of(plain), []))
    assert sum(inputs_of(dataset), []) == (plain_inputs + 1).tolist()
    assert not dataset.asked


def test_a_subset_of_such_a_class_asks_for_single_samples_too():
    everything = [*range(11)]
    assert inputs_of(Subset(Shifted(11), everything)) == inputs_of(Shifted(11))
    several = Several(11)
    assert inputs_of(Subset(several, everything)) == inputs_of(Squares(11))
    assert several.asked


def test_a_mapping_is_no_list_of_samples():
    class Columns(Several):
        def __getitems__(self, indices):
            return {str(index): index for index in indices}

    with pytest.raises(TypeError, match="Columns.__getitems__: expected a list of "):
        inputs_of(Columns(11))


def test_fewer_samples_than_asked_for_are_refused():
    with pytest.raises(ValueError, match="TooFew.__getitems__: expected 4 .* got 3"):
        inputs_of(TooFew(11))


@pytest.mark.parametrize("kind", [int, numpy.int64, torch.tensor])
def test_input_keys_may_be_integers_of_any_kind(kind):
    dataset = Squares(5)
    dataset.input_key = lambda index, epoch: kind(index)
    (batch,) = batches(dataset, ElasticSampler(5, 5))
    assert sorted(batch.input_keys.tolist()) == [0, 1, 2, 3, 4]


def test_an_input_key_of_another_kind_is_refused():
    dataset = Squares(5)
    dataset.input_key = lambda index, epoch: 0.5
    with pytest.raises(TypeError, match="input_key: expected an int, got 0.5"):
        list(batches(dataset, ElasticSampler(5, 5)))
