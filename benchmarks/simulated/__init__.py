"""Simulated steps alongside measured ones, and the ladder of the paper."""
