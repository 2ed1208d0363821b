"""What an active rank drives: its stages, the frozen layers before them."""
