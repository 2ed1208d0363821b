"""One change of plan: proposed, agreed on, prepared, moved, recorded."""
