"""Room ``core``: what every room may use; imports no torch and no other room."""
