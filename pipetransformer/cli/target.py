"""Finds the model and its sample inputs that ``MODULE:ATTR`` names."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from pipetransformer.planner.measure import Inputs

_CONTAINERS = (tuple, list, Mapping)


@dataclass(frozen=True)
class Target:
    """What is profiled.

    Args:
        model: the model.
        sample: inputs of its first layer.
    """

    model: nn.Sequential
    sample: Inputs


def load_target(name: str, sample: str | None, *, show_traceback: bool) -> Target:
    """Import a model and its sample, calling builders that take no arguments.

    Args:
        name: ``MODULE:ATTR`` of an ``nn.Sequential``, of a pair of one and its
            sample, or of a callable that returns either.
        sample: ``MODULE:ATTR`` of a tensor, tuple, list or dict, or of a callable
            that returns one; None: the pair has it.
        show_traceback: print the traceback of an error in the imported code.

    Raises:
        ValueError: a name that cannot be imported, code that fails, or another type.
    """
    import torch
    from torch import nn

    found = _load(name, show_traceback, plain=(nn.Module, *_CONTAINERS))
    model, inputs = found, None
    if isinstance(found, (tuple, list)):
        if len(found) != 2:
            raise ValueError(
                f"{name}: expected a model, or a pair of model and sample, got "
                f"{len(found)} values"
            )
        model, inputs = found
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"{name}: expected an nn.Sequential, got {type(model).__name__}"
        )
    if sample is not None:
        inputs = _load(sample, show_traceback, plain=(torch.Tensor, *_CONTAINERS))
    elif inputs is None:
        raise ValueError(
            f"{name}: expected a pair of model and sample, or --sample MODULE:ATTR, "
            "got a model alone"
        )
    if not isinstance(inputs, (torch.Tensor, *_CONTAINERS)):
        raise ValueError(
            f"{sample or name} sample: expected a tensor, tuple, list or dict, got "
            f"{type(inputs).__name__}"
        )
    return Target(model, inputs)


@contextlib.contextmanager
def users_code(
    what: str, show_traceback: bool, *, ours: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn whatever fails inside into a ValueError that names ``what``.

    What the code prints goes to standard error: standard output is the command's.

    Args:
        what: the code that runs.
        show_traceback: print where it failed.
        ours: errors that are clear as they are, if it is this library that raises them.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        if show_traceback:
            traceback.print_exc()
        if isinstance(error, ours) and _is_ours(error):
            raise
        raise ValueError(
            f"{what}: expected code that runs, got {type(error).__name__}: {error}"
        ) from error


def _is_ours(error: BaseException) -> bool:
    """Tell whether it was raised in this library, and not in code that it calls."""
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""
    return raised_in.partition(".")[0] == __package__.partition(".")[0]


def _load(name: str, show_traceback: bool, plain: tuple[type, ...]) -> object:
    """Import ``MODULE:ATTR``; what is not of a ``plain`` type is called."""
    module_name, _, path = name.partition(":")
    if not module_name or not path or not path.replace(".", "").isidentifier():
        raise ValueError(f"{name}: expected MODULE:ATTR, such as models:build_model")
    # Last, so that no file there takes an installed module's place.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    with users_code(name, show_traceback):
        value: object = importlib.import_module(module_name)
        for attribute in path.split("."):
            value = getattr(value, attribute)
        if not isinstance(value, plain) and callable(value):
            value = value()
    return value
