"""Private names of the pipe room's random draws, for its tests."""

from pipetransformer import _C
from pipetransformer.pipe import draw_scope

keyed_draws_work = _C.pipe.keyed_draws_work


class FallbackScope(draw_scope):
    """A draw scope that does not use the dispatch-key mechanism."""

    def __init__(self, seed, step, *, microbatch, layer=0):
        self._scope = _C.pipe.DrawScope(seed, step, microbatch, layer, False)


def force_fallback(monkeypatch):
    """Let pipes and draw scopes work as where the mechanism is not available."""
    monkeypatch.setattr(_C.pipe, "keyed_draws_work", lambda: False)


__all__ = ["FallbackScope", "force_fallback", "keyed_draws_work"]
