"""Room ``report``."""
