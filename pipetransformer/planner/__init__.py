"""Room ``planner``."""
