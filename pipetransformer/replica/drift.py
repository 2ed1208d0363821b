"""Finds what changes frozen layers from pass to pass, so that no record is of use.

A record is found again if its layers are what they were. Layers that change in each
pass, since one of them keeps its last output in an attribute, say, are computed for
every batch, and look as if they were cached.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from pipetransformer.autocache import prefix_content

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 3


class Drift:
    """Warns once of layers that keep their records from being found again.

    That is at the second pass in a row that begins with changed layers, or after two
    whole rounds of passes in which layers that did not change here found as many
    records of others: then another replica's frozen layers are not the same. Records
    that are left of an older boundary become fewer from pass to pass.

    Args:
        layers: The frozen ones.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._chain: list[int] | None = None
        self._content: dict[str, str] | None = None  # since they have changed
        self._told = False
        self._counts = 0, 0
        self._stale, self._stale_passes = 0, 0

    def begin_pass(
        self, chain: list[int], counts: tuple[int, int] = (0, 0), views: int = 1
    ) -> None:
        """Take in the layers' fingerprints at the beginning of a pass.

        Args:
            chain: The fingerprints.
            counts: Records of other layers so far, and rows asked for; zeros where
                there is no other replica whose layers these could be.
            views: After how many passes samples come again.
        """
        before, self._chain = self._chain, chain
        stale, asked = counts[0] - self._counts[0], counts[1] - self._counts[1]
        steady = 8 * stale >= max(asked, 1) and 2 * stale >= self._stale
        self._counts, self._stale = counts, stale
        if self._told or before is None:
            return
        if before == chain:
            self._content = None
            self._stale_passes = self._stale_passes + 1 if steady else 0
            if self._stale_passes >= 2 * views:
                self._told = True
                _LOG.warning(
                    "cache: records are of other frozen layers in each pass, though "
                    "these have not changed: another replica's differ, in an attribute "
                    "that a script sets on one rank alone, say (engine.is_main)"
                )
            return
        self._stale_passes = 0
        known, self._content = self._content, prefix_content(self._layers)
        if known is not None:
            self._told = True
            self._warn(known, self._content)

    @staticmethod
    def _warn(before: dict[str, str], now: dict[str, str]) -> None:
        changed = [name for name in now if before.get(name) != now[name]]
        more = ", ..." if len(changed) > _MOST_NAMED else ""
        _LOG.warning(
            "cache: nothing is found again, as frozen layers change from pass to pass: "
            "%s%s; what a layer keeps of a batch, for plots, say, belongs into a hook, "
            "and what scripts change, behind the frozen layers",
            ", ".join(changed[:_MOST_NAMED]) or "what they compute in, as autocast",
            more,
        )
