"""The switch that restores the old pipeline's observable behaviour exactly."""

from __future__ import annotations

import importlib
import os

# Read once: a pipeline keeps what was in force when it was built.
_strict = os.environ.get("PIPETRANSFORMER_STRICT_COMPAT") == "1"


def is_strict() -> bool:
    """Return whether pipelines built from here on follow the old one exactly.

    True from the start when ``PIPETRANSFORMER_STRICT_COMPAT=1`` is in the
    environment of the first import. Pipelines from a plan are never strict.
    """
    return _strict


def set_strict(strict: bool) -> None:
    """Let pipelines built from here on follow the old one exactly, or not.

    Args:
        strict: Whether. Pipelines that exist already do not change.
    """
    global _strict
    _strict = bool(strict)


def check_rpc() -> None:
    """Raise RuntimeError unless this process has an RPC agent."""
    try:
        api = importlib.import_module("torch.distributed.rpc.api")
        has_agent = bool(api._is_current_rpc_agent_set())
    except (ImportError, AttributeError):  # built without RPC
        has_agent = False
    if not has_agent:
        raise RuntimeError(
            "Please initialize RPC framework: expected torch.distributed.rpc.init_rpc "
            "to have been called before Pipe (strict compatibility asks for it), got "
            "no agent"
        )
