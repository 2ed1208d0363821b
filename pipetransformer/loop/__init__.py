"""The user's script, call by call: epoch, step, evaluation."""
