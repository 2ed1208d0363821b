"""What a pipeline of equal stages can reach against one processor at best."""

from __future__ import annotations


def pipeline_speedup(num_stages: int, num_microbatches: int) -> float:
    """Return K*M / (M + K - 1): a step with one bubble, GPipe's or 1F1B's.

    Args:
        num_stages: K, each on a processor of its own; >= 1.
        num_microbatches: M, of equal size; >= 1.

    Source: GPipe, section 2.3.
    """
    _check(num_stages, num_microbatches)
    return num_stages * num_microbatches / (num_microbatches + num_stages - 1)


def zero_bubble_speedup(num_stages: int, num_microbatches: int) -> float:
    """Return 3*K*M / (3*M + K - 1): weight gradients fill the bubble of ZB-H1.

    Forward, input gradient and weight gradient are taken as equally long.

    Args:
        num_stages: K, >= 1.
        num_microbatches: M, >= 1.

    Source: zero-bubble pipeline parallelism, schedule ZB-H1.
    """
    _check(num_stages, num_microbatches)
    work = 3 * num_microbatches
    return num_stages * work / (work + num_stages - 1)


def one_f_one_b_saved_share(num_stages: int, num_microbatches: int) -> float:
    """Return the activations that 1F1B keeps at most, over those of GPipe.

    Stage j (from 0) holds min(M, K - j) micro-batches where GPipe holds M.

    Args:
        num_stages: K, >= 1.
        num_microbatches: M, >= 1.
    """
    _check(num_stages, num_microbatches)
    held = [min(num_microbatches, num_stages - j) for j in range(num_stages)]
    return sum(held) / (num_stages * num_microbatches)


def _check(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            "bound: expected at least one stage and one micro-batch, got "
            f"{num_stages} and {num_microbatches}"
        )
