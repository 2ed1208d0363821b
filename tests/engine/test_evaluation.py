"""How an evaluation set is cut."""

from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.loop.evaluation import microbatches


@given(st.integers(1, 5000), st.integers(1, 300))
def test_microbatches_hold_each_sample_once_and_are_one_row_apart(total, most):
    cut = microbatches(total, most)
    assert [i for rows in cut for i in rows] == list(range(total))
    sizes = {len(rows) for rows in cut}
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(cut) == -(-total // most)
