"""Room ``adapters``."""
