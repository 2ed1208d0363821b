"""What a change of plan costs."""
