"""What outlives a plan: arguments, caches, control log, measured costs."""
