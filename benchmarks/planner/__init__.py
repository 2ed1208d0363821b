"""What the planner cuts, and how else it could be cut."""
