"""The paper's rules against its published partitions and pipeline lengths."""

import pytest

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
