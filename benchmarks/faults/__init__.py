"""Runs that faults strike, and who judges them."""
