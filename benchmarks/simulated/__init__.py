"""Simulated steps beside measured ones, and the ladder of the paper."""
