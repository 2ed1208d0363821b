"""A hint for scripts that import the package which ``torchgpipe.balance`` replaced."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Sequence


class MissingBalancing(importlib.abc.MetaPathFinder):
    """Finds nothing, and says where to look instead."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Raise ImportError for the replaced package."""
        if fullname == "torchgpipe_balancing":
            raise ImportError(
                "torchgpipe_balancing: expected torchgpipe.balance, which replaced it",
                name=fullname,
            )
        return None
