"""Room ``autocache``."""
