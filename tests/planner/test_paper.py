"""The paper's rules against its published partitions and pipeline lengths."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.planner import paper

BLOCK = [2_363_904, 4_723_968]
LARGE_BLOCK = [4_200_448, 8_395_776]
BERT_BASE = [23_837_184, *BLOCK * 12, 590_592, 1_538]
BERT_LARGE = [31_782_912, *LARGE_BLOCK * 24, 2_050]

# Layers frozen at epochs 0 .. 9 by the cap L (1 - (1 - alpha)^T), rounded up.
FROZEN = {
    (12, "1/5"): [0, 3, 5, 6, 8, 9, 9, 10, 10, 11],
    (12, "1/4"): [0, 3, 6, 7, 9, 10, 10, 11, 11, 12],
    (12, "1/3"): [0, 4, 7, 9, 10, 11, 11, 12, 12, 12],
    (12, "2/5"): [0, 5, 8, 10, 11, 12, 12, 12, 12, 12],
    (12, "1/2"): [0, 6, 9, 11, 12, 12, 12, 12, 12, 12],
    (12, "0.07"): [0, 1, 2, 3, 4, 4, 5, 5, 6, 6],
    (24, "1/3"): [0, 8, 14, 17, 20, 21, 22, 23, 24, 24],
}


def vit_base(classes):
    return [742_656, *BLOCK * 12, 1_536, 768 * classes + classes]


@pytest.mark.parametrize("classes", [10, 100, 1000])
@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        ("1/5", [8, 8, 4, 4, 4, 2, 2, 2, 2, 1]),
        ("1/4", [8, 8, 4, 4, 2, 2, 2, 1, 1, 1]),
        ("1/3", [8, 8, 4, 2, 2, 1, 1, 1, 1, 1]),
        ("2/5", [8, 4, 4, 2, 1, 1, 1, 1, 1, 1]),
        ("1/2", [8, 4, 2, 1, 1, 1, 1, 1, 1, 1]),
        ("0.07", [8, 8, 8, 8, 8, 8, 4, 4, 4, 4]),
    ],
)
def test_vit_base_pipeline_lengths_follow_the_paper(classes, alpha, expected):
    lengths = paper.num_stages_by_epoch(vit_base(classes), FROZEN[12, alpha])
    assert lengths == expected


def test_a_miss_by_seven_hundredths_of_a_percent_keeps_four_stages():
    sizes = vit_base(10)
    frozen = [0, 6, 6, 8, 8, 8, 10, 10, 12, 12]
    assert paper.num_stages_by_epoch(sizes, frozen) == [8, 4, 4, 4, 4, 4, 2, 2, 1, 1]
    assert paper.largest_load(sizes, 8) == 14_175_744
    assert paper.largest_load(sizes[17:], 2) == 14_184_970


def test_an_equal_largest_stage_is_accepted():
    sizes = vit_base(1000)
    largest = paper.largest_load(sizes, 8)
    assert paper.largest_load(sizes[1 + 2 * 5 :], 4) == largest  # equality decides
    assert paper.compress(sizes[1 + 2 * 5 :], 8, largest_allowed=largest) == 4
    assert paper.compress(sizes[1 + 2 * 5 :], 8, largest_allowed=largest - 1) == 8


def test_bert_large_pipeline_lengths_depend_on_the_true_depth():
    short = FROZEN[12, "1/3"][:3]
    assert paper.num_stages_by_epoch(BERT_LARGE, short) == [8, 8, 8]
    lengths = paper.num_stages_by_epoch(BERT_LARGE, FROZEN[24, "1/3"])
    assert lengths == [8, 8, 4, 2, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "counts", "largest"),
    [
        (vit_base(1000), [4, 2, 3, 3, 3, 3, 4, 5], 14_175_744),
        (vit_base(1000), [7, 6, 6, 8], 22_034_152),
        (vit_base(1000), [13, 14], 43_297_768),
        (BERT_BASE, [0, 0, 0, 1, 6, 6, 6, 8], None),
        (BERT_BASE, [3, 7, 8, 9], None),
        (BERT_LARGE, [2, 6, 6, 6, 7, 7, 8, 8], None),
    ],
)
def test_greedy_partition_equals_the_published_one(sizes, counts, largest):
    assert paper.greedy_partition(sizes, len(counts)) == counts
    if largest is not None:
        assert paper.largest_load(sizes, len(counts)) == largest


def cut_by_fractions(active, frozen, num_stages):
    """Return counts and largest load of the greedy rule, one formula at a time."""
    charge = Fraction(sum(frozen), 6)
    counts, loads, rest = [], [], list(active)
    for stage in range(num_stages):
        left = num_stages - stage
        load = charge if stage == 0 else Fraction(0)
        mean = (sum(rest) + load) / left / 10**6
        center = Fraction(sum(rest), len(rest) or 1)
        spread = sum((size - center) ** 2 for size in rest) / (len(rest) or 1)
        limit = mean + spread / left / 10**12
        count = 0
        while count < len(rest) and (left == 1 or (load + rest[count]) / 10**6 < limit):
            load += rest[count]
            count += 1
        rest = rest[count:]
        counts.append(count)
        loads.append(load)
    return counts, max(loads)


PARAMETERS = st.lists(
    st.integers(0, 40_000_000) | st.sampled_from([0, 1, 6_000_000, 2**40]), max_size=12
)


@given(PARAMETERS, PARAMETERS, st.integers(1, 6))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_greedy_rule_with_frozen_units_is_exact(active, frozen, num_stages):
    counts, largest = cut_by_fractions(active, frozen, num_stages)
    charged = {"frozen_sizes": frozen}
    assert paper.greedy_partition(active, num_stages, **charged) == counts
    rounded_up = -(-largest.numerator // largest.denominator)
    assert paper.largest_load(active, num_stages, **charged) == rounded_up


def test_frozen_units_weigh_a_sixth_on_the_first_stage():
    block = 6_000_000
    free = paper.greedy_partition([block] * 5, 2)
    charged = paper.greedy_partition(
        [block] * 5, 2, frozen_sizes=[8 * block, 4 * block]
    )
    assert (free, charged) == ([2, 3], [1, 4])  # 2 blocks' worth of load are there
    assert paper.greedy_partition([block] * 5, 2, frozen_sizes=[100 * block]) == [0, 5]
    load = paper.largest_load([block] * 5, 2, frozen_sizes=[60 * block])
    assert load == 10 * block, "the first stage, though it trains nothing"


def test_a_sixth_of_one_parameter_decides():
    allowed = {"largest_allowed": 100}
    assert paper.compress([99], 2, frozen_sizes=[6], **allowed) == 1
    assert paper.compress([99], 2, frozen_sizes=[7], **allowed) == 2
    assert paper.largest_load([99], 1, frozen_sizes=[7]) == 101


def test_charged_frozen_layers_keep_pipelines_longer():
    frozen = FROZEN[12, "1/3"]
    free = paper.num_stages_by_epoch(vit_base(1000), frozen)
    charged = paper.num_stages_by_epoch(vit_base(1000), frozen, charge_frozen=True)
    assert free == [8, 8, 4, 2, 2, 1, 1, 1, 1, 1]
    # At the end 85,797,120 frozen parameters weigh 14,299,520: above 14,175,744.
    assert sum(vit_base(1000)[:25]) == 6 * 14_299_520
    assert charged == [8, 8, 4, 4, 4, 2, 2, 2, 2, 2]


def test_microbatch_table_is_the_published_one():
    assert [paper.num_microbatches(k) for k in (8, 4, 2, 1)] == [16, 16, 16, 4]
    assert paper.microbatch_candidates(2) == list(range(2, 13))


@pytest.mark.parametrize(
    ("sizes", "num_stages", "text"),
    [
        ([1, 2], 0, "num_stages: expected 1 to 1048576, got 0"),
        ([1, -2], 1, r"unit_sizes: expected parameter counts from 0 .*, got -2"),
    ],
)
def test_greedy_partition_refuses_malformed_input(sizes, num_stages, text):
    with pytest.raises(ValueError, match=text):
        paper.greedy_partition(sizes, num_stages)


def test_malformed_frozen_size_is_refused_by_name():
    with pytest.raises(ValueError, match=r"frozen_sizes: expected .*, got -2"):
        paper.largest_load([1], 1, frozen_sizes=[-2])
