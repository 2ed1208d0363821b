"""Room ``simulator``: plays steps and runs on devices that need not be there."""
