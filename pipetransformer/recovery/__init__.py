"""Going on without lost ranks: who is left, who is ahead, the call again."""
