"""Room ``autodp``."""
