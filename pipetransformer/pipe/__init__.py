"""Room ``pipe``."""
