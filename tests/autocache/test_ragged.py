"""Rows of different lengths: found whatever their padding, stored as they are."""

import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.autocache import (
    ActivationCache,
    Ragged,
    hash_ragged_rows,
    record_bytes,
)

WIDTH = 6


def first_lengths(inputs):
    return (inputs[0] != 0).sum(1)


RAGGED = Ragged(first_lengths, fill=(0.5, 0))


def make_cache(num_samples, *, usual=12, budget=1 << 20, **options):
    record = [torch.zeros(1, usual, WIDTH), torch.zeros(1, usual, dtype=torch.bool)]
    return ActivationCache.create(
        run_id="run",
        num_samples=num_samples,
        slot_bytes=record_bytes(record),
        budget_bytes=budget,
        ragged=True,
        verify="all",
        **options,
    )


def valid_part(sample, boundary, length, dtype=torch.float32):
    """What the frozen layers make of a sample."""
    base = 100 * sample + 10 * boundary + torch.arange(length)[:, None]
    return (base + torch.arange(WIDTH) / 8).to(dtype)


def padded_batch(ids, lengths, padded, boundary=1, dtype=torch.float32, junk=9):
    """Hidden states and mask of samples; behind their ends stands `junk`."""
    hidden = torch.full((len(ids), padded, WIDTH), junk, dtype=dtype)
    mask = torch.zeros(len(ids), padded, dtype=torch.bool)
    for row, (sample, length) in enumerate(zip(ids, lengths, strict=True)):
        hidden[row, :length] = valid_part(sample, boundary, length, dtype)
        mask[row, :length] = True
    return hidden, mask


def put(cache, ids, lengths, padded, boundary=1, **options):
    return cache.store(
        torch.tensor(ids),
        padded_batch(ids, lengths, padded, boundary),
        boundary=boundary,
        fingerprint=boundary,
        ragged=RAGGED,
        lengths=torch.tensor(lengths),
        **options,
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_is_found_with_its_own_part_whatever_it_was_padded_with(data):
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=10))
    cache = make_cache(len(lengths))
    at = {}
    for boundary in (1, 2):
        ids = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
        if ids:
            longest = max(lengths[i] for i in ids)
            padded = longest + data.draw(st.integers(0, 3))
            own = [lengths[i] for i in ids]
            assert put(cache, ids, own, padded, boundary) == len(ids)
            at.update(dict.fromkeys(ids, boundary))
    asked = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1))
    fixed = data.draw(st.none() | st.integers(0, 15))
    groups = cache.fetch(
        torch.tensor(asked), chain=[0, 1, 2], ragged=RAGGED, length=fixed
    )
    seen = set()
    for group in groups:
        hidden, mask = group.tensors
        for k, row in enumerate(group.rows.tolist()):
            sample, length = asked[row], lengths[asked[row]]
            assert group.boundary == at[sample] and group.lengths[k] == length
            part = valid_part(sample, group.boundary, length)
            assert torch.equal(hidden[k, :length], part)
            assert (hidden[k, length:] == 0.5).all()
            assert mask[k].tolist() == [True] * length + [False] * (
                len(mask[k]) - length
            )
            seen.add(row)
        longest = int(group.lengths.max())
        assert hidden.shape[1] == (fixed if fixed is not None else longest)
    fits = [fixed is None or lengths[i] <= fixed for i in asked]
    expected = {r for r, i in enumerate(asked) if i in at and fits[r]}
    assert seen == expected
    assert (cache.counters.hits, cache.counters.corrupt) == (len(seen), 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    ("dim", "spec"), [(1, 1), (2, 2), (3, (3, None)), (2, (2, None))]
)
def test_any_dim_of_any_type_may_be_the_padded_one(dtype, dim, spec):
    ids, lengths = [3, 1, 2], [5, 2, 7]
    hidden, _ = padded_batch(ids, lengths, 8, dtype=dtype)
    if dim == 3:
        hidden = hidden[:, :, None].expand(-1, -1, 2, -1)
    hidden = hidden.movedim(1, dim)
    whole = torch.arange(3)[:, None] + torch.arange(4)  # (rows, 4): not padded
    ragged = Ragged(first_lengths, dim=spec, fill=0)
    cache = make_cache(4)
    stored = (
        cache.store(
            torch.tensor(ids),
            (hidden, whole),
            boundary=1,
            fingerprint=1,
            ragged=ragged,
            lengths=torch.tensor(lengths),
        )
        if spec != 1
        else cache.store(
            torch.tensor(ids),
            (hidden,),
            boundary=1,
            fingerprint=1,
            ragged=ragged,
            lengths=torch.tensor(lengths),
        )
    )
    assert stored == 3
    (group,) = cache.fetch(
        torch.tensor(ids[::-1]), chain=[0, 1], ragged=ragged, length=10
    )
    found = group.tensors[0].movedim(dim, 1)
    assert found.dtype == dtype and found.shape[1] == 10
    for row, (sample, length) in enumerate(zip(ids[::-1], lengths[::-1], strict=True)):
        part = valid_part(sample, 1, length, dtype)
        part = part[:, None].expand(-1, 2, -1) if dim == 3 else part
        assert torch.equal(found[row, :length], part)
        assert not found[row, length:].any()
    if spec != 1:
        assert torch.equal(group.tensors[1], whole.flip(0))


def test_padding_does_not_count_in_a_hash_and_all_else_does():
    def hashed(tokens, lengths, padded, types=torch.int64):
        ids = torch.zeros(len(tokens), padded, dtype=types)
        for row, values in zip(ids, tokens, strict=True):
            row[: len(values)] = torch.tensor(values)
        ids[:, max(map(len, tokens)) :] = 7  # padding of another kind
        ragged = Ragged(lambda inputs: torch.tensor(lengths))
        return hash_ragged_rows(ragged.rows_of((ids,), [ids])).tolist()

    tokens = [[1, 2, 3], [4, 5], [1, 2]]
    own = hashed(tokens, [3, 2, 2], 3)
    assert own == hashed(tokens, [3, 2, 2], 9)
    assert len(set(own)) == 3  # (1, 2) is not (1, 2, 3)
    assert hashed(tokens, [3, 2, 1], 3)[2] != own[2]
    assert hashed([[1, 2, 4], [4, 5], [1, 2]], [3, 2, 2], 3)[0] != own[0]
    assert hashed([[1, 2, 0]], [3], 3)[0] != hashed([[1, 2]], [2], 3)[0]
    assert hashed(tokens, [3, 2, 2], 3, torch.int32) != own


def test_bytes_follow_the_lengths():
    lengths = [3 + 7 * k % 60 for k in range(200)]
    cache = make_cache(200, budget=8 << 20)
    for first in range(0, 200, 20):
        ids = list(range(first, first + 20))
        assert put(cache, ids, lengths[first : first + 20], 64) == 20
    used = cache.used_bytes
    needed = sum(lengths) * (WIDTH * 4 + 1)
    # Of wider hidden states the 240 bytes of a header are a lesser part.
    assert needed < used <= needed + 200 * (240 + 16 + 64)
    assert put(cache, list(range(200)), lengths, 64) == 0
    assert cache.used_bytes == used and cache.counters.skipped == 200


def test_what_fits_the_budget_stays_and_the_rest_is_counted():
    cache = make_cache(50, budget=4096 + 448 + 6 * 1024)
    stored = put(cache, list(range(50)), [12] * 50, 12)
    assert 0 < stored < 50 and cache.counters.full == 50 - stored
    assert cache.used_bytes <= 6 * 1024
    (group,) = cache.fetch(torch.arange(50), chain=[0, 1], ragged=RAGGED)
    assert group.rows.tolist() == list(range(stored))


def test_a_record_that_outgrows_its_place_gets_another():
    cache = make_cache(2)
    put(cache, [0, 1], [3, 3], 3)
    put(cache, [0], [90], 90, boundary=2)
    small, large = cache.fetch(torch.tensor([0, 1]), chain=[0, 1, 2], ragged=RAGGED)
    assert (small.rows.tolist(), small.lengths.tolist()) == ([1], [3])
    assert (large.rows.tolist(), large.lengths.tolist()) == ([0], [90])
    assert torch.equal(large.tensors[0][0], valid_part(0, 2, 90))


def test_without_a_spec_ragged_records_are_misses():
    cache = make_cache(2)
    put(cache, [0, 1], [3, 4], 5)
    assert cache.fetch(torch.tensor([0, 1]), chain=[0, 1]) == []
    assert cache.counters.changed == 2


def _read_as_another_process(address, queue):
    cache = ActivationCache.attach(address, run_id="run", verify="all")
    (group,) = cache.fetch(torch.tensor([1, 0]), chain=[0, 1], ragged=RAGGED)
    stored = put(cache, [2], [70], 80)
    queue.put((group.lengths.tolist(), group.tensors[0][1, :3].tolist(), stored))


def test_another_process_reads_and_adds_ragged_records():
    cache = make_cache(3)
    put(cache, [0, 1], [3, 9], 9)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    other = context.Process(
        target=_read_as_another_process, args=(cache.address, queue)
    )
    other.start()
    other.join(60)
    assert other.exitcode == 0
    assert queue.get() == ([9, 3], valid_part(0, 1, 3).tolist(), 1)
    (group,) = cache.fetch(torch.tensor([2]), chain=[0, 1], ragged=RAGGED)
    assert torch.equal(group.tensors[0][0], valid_part(2, 1, 70))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (dict(lengths=3), r"Ragged\.lengths: expected a function"),
        (dict(dim=0), r"Ragged\.dim: expected a number >= 1"),
        (dict(dim=(None, None)), r"Ragged\.dim: expected a number >= 1"),
        (dict(dim=True), r"Ragged\.dim: expected a number >= 1"),
        (dict(input_dim=-1), r"Ragged\.input_dim: expected a number >= 1"),
        (dict(fill="x"), r"Ragged\.fill: expected a number"),
        (dict(fill=()), r"Ragged\.fill: expected a number"),
    ],
)
def test_a_wrong_spec_is_refused(fields, error):
    with pytest.raises((TypeError, ValueError), match=error):
        Ragged(**{"lengths": first_lengths, **fields})


@pytest.mark.parametrize(
    ("lengths", "error"),
    [
        (torch.tensor([1.0, 2.0]), "expected a tensor of integers"),
        ([1, 2], "expected a tensor of integers"),
        (torch.tensor([1, 2, 3]), r"expected 2 numbers of 0\.\.5 .* got \[1, 2, 3\]"),
        (torch.tensor([1, 6]), r"expected 2 numbers of 0\.\.5 .* got \[1, 6\]"),
        (torch.tensor([-1, 2]), r"expected 2 numbers of 0\.\.5"),
    ],
)
def test_wrong_lengths_are_refused(lengths, error):
    inputs = torch.ones(2, 5)
    with pytest.raises((TypeError, ValueError), match=error):
        Ragged(lambda _: lengths).rows_of(inputs, [inputs])


def test_inputs_of_other_shapes_than_the_spec_are_refused():
    inputs = [torch.ones(2, 5), torch.ones(2, 6)]
    with pytest.raises(ValueError, match=r"one padded length .* got shapes \(2, 5\), "):
        RAGGED.rows_of(inputs, inputs)
    mapping = {"ids": inputs[0], "feats": inputs[1]}
    tensors = [inputs[1], inputs[0]]
    with pytest.raises(ValueError, match="of feats, ids, in this order; name one dim"):
        RAGGED.rows_of(mapping, tensors)
    wrong = Ragged(lambda _: torch.tensor([1, 9]), input_dim=(None, 1))
    with pytest.raises(ValueError, match=r"along input_dim=\(None, 1\) of feats, ids"):
        wrong.rows_of(mapping, tensors)
    named = Ragged(lambda _: torch.tensor([1, 5]), input_dim=(1, None))
    assert named.rows_of(inputs, inputs).padded == 5
    with pytest.raises(ValueError, match="expected tensors with dims"):
        named.rows_of(inputs, inputs[:1])


# -- rows with several lengths -----------------------------------------------------

PAIRED = Ragged(
    lambda inputs: torch.stack([(part != 0).sum(1) for part in inputs], 1),
    dim=(1, 1, None),
    fill=(0.5, 7),
    input_dim=(1, 1),
    which=(0, 1, 0),
    input_which=(0, 1),
)


def paired(lengths, padded, junk):
    """Inputs of rows with two lengths, and what layers make of them."""
    ids = [torch.zeros(len(lengths), n, dtype=torch.int64) for n in padded]
    hidden = torch.full((len(lengths), padded[0], WIDTH), float(junk))
    words = torch.full((len(lengths), padded[1]), junk)
    for row, ends in enumerate(lengths):
        for tensor, end in zip(ids, ends, strict=True):
            tensor[row, :end] = torch.arange(end) + 10 * row + 1
        hidden[row, : ends[0]] = valid_part(row, 1, ends[0])
        words[row, : ends[1]] = torch.arange(ends[1]) + row
    return ids, (hidden, words, torch.arange(len(lengths))[:, None])


def test_a_row_with_two_lengths_is_found_whatever_both_are_padded_with():
    lengths = [(2, 5), (7, 1), (3, 3), (1, 6)]
    cache = make_cache(4)
    (stored, tensors), (asked, _) = (
        paired(lengths, (8, 6), 9),
        paired(lengths, (7, 11), 8),
    )
    rows, others = (PAIRED.rows_of(each, each) for each in (stored, asked))
    assert (rows.padded, rows.widths) == (8, [8, 6]) and others.widths == [7, 11]
    assert rows.lengths.tolist() == [5, 7, 3, 6]
    hashes = hash_ragged_rows(rows)
    assert torch.equal(hash_ragged_rows(others), hashes)
    cache.store(
        torch.arange(4),
        PAIRED.joined(tensors, rows),
        boundary=1,
        fingerprint=1,
        input_hashes=hashes,
        ragged=PAIRED,
        lengths=rows.lengths,
    )
    (found,) = cache.fetch(
        torch.arange(4),
        chain=[0, 1],
        input_hashes=hashes,
        ragged=PAIRED,
        length=others.padded,
    )
    hidden, words, whole = PAIRED.parted(found.tensors, others)
    assert hidden.shape == (4, 7, WIDTH) and words.shape == (4, 11)
    assert PAIRED.misfit((hidden, words, whole), others.widths) is None
    for row, (first, second) in enumerate(lengths):
        assert torch.equal(hidden[row, :first], valid_part(row, 1, first))
        assert (hidden[row, first:] == 0.5).all() and (words[row, second:] == 7).all()
        assert words[row, :second].tolist() == [row + k for k in range(second)]
    assert whole.tolist() == [[0], [1], [2], [3]]


def test_a_row_without_one_of_its_texts_is_told_by_its_padding():
    """What reads it reads padding, so with other padding it is another sample."""
    lengths = [(2, 5), (7, 0), (0, 6)]
    one, other = (paired(lengths, widths, 9)[0] for widths in ((8, 6), (8, 9)))
    rows, others = PAIRED.rows_of(one, one), PAIRED.rows_of(other, other)
    assert rows.own.tolist() == [[2, 5], [7, 6], [8, 6]]
    assert rows.bare.tolist() == [False, True, True]
    same = hash_ragged_rows(rows) == hash_ragged_rows(others)
    assert same.tolist() == [True, False, True], "its source is padded to 8 in both"


def test_the_hash_tells_rows_apart_that_divide_their_lengths_otherwise():
    pairs = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 0]])]
    moved = [torch.tensor([[1, 2, 0]]), torch.tensor([[3, 4, 5]])]
    first, second = (hash_ragged_rows(PAIRED.rows_of(p, p)) for p in (pairs, moved))
    assert first.tolist() != second.tolist()


def test_the_hash_tells_zeros_from_the_end_of_a_row():
    def lengths(inputs):
        return torch.stack([(part != 1).sum(1) for part in inputs], 1)

    spec = Ragged(lengths, dim=(1, 1), which=(0, 1), input_which=(0, 1))
    target = torch.tensor([[5, 6, 7, 8]])
    zeros, short = (torch.tensor([[4, n, n]]) for n in (0, 1))
    first, second = (
        hash_ragged_rows(spec.rows_of(pair, pair))
        for pair in ([zeros, target], [short, target])
    )
    assert first.tolist() != second.tolist()


def test_several_lengths_that_do_not_fit_the_tensors_are_refused():
    with pytest.raises(ValueError, match=r"Ragged.which: expected it with input_which"):
        Ragged(first_lengths, which=(0, 1))
    with pytest.raises(TypeError, match=r"Ragged.which: expected a tuple of numbers"):
        Ragged(first_lengths, which=[0, 1], input_which=(0, 1))
    with pytest.raises(TypeError, match=r"Ragged.input_which: .* got \('a',\)"):
        Ragged(first_lengths, which=(0,), input_which=("a",))
    for which, input_which in (((0, 5), (0, 1)), ((0, 1), (0, 2))):
        with pytest.raises(ValueError, match="the numbers of all lengths from 0 on"):
            Ragged(first_lengths, which=which, input_which=input_which)
    inputs = [torch.ones(2, 5), torch.ones(2, 4)]
    with pytest.raises(ValueError, match=r"expected 2 numbers of 0..5, 4"):
        Ragged(
            lambda _: torch.tensor([5, 5]), which=(0, 1), input_which=(0, 1)
        ).rows_of(inputs, inputs)
    rows = PAIRED.rows_of(inputs, inputs)
    _, tensors = paired([(1, 1), (1, 1)], (5, 5), 9)
    assert "padded length 5, 4" in PAIRED.misfit(tensors, rows.widths)
    told = PAIRED.misfit(tensors[:2], rows.widths)
    assert "expected tensors with dims" in told or "a number of a length" in told
