"""Room ``autofreeze``."""
