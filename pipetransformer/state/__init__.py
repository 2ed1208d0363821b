"""The training state: weights, optimizer, counters; and the same as bytes."""
