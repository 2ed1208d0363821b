"""Models of the peft package: the task model within, and the same with merged weights.

An adapter lives in layers if peft puts it into the task model's own submodules, whose
calls it changes and nothing else. Such a task model is cut like any other.
"""

from __future__ import annotations

import collections
import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

IN_LAYERS = (
    "LORA",
    "IA3",
    "LOHA",
    "LOKR",
    "OFT",
    "HRA",
    "MISS",
    "FOURIERFT",
    "LN_TUNING",
)
"""Methods by their ``peft_type``."""


def is_peft(model: object) -> bool:
    """Tell whether a model is one of peft, without importing it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def task_model_of(model: Any) -> nn.Module:
    """Return the task model that adapters were put into.

    Raises:
        ValueError: an adapter of a method that does not live in layers.
    """
    for name, config in model.peft_config.items():
        method = str(getattr(config.peft_type, "value", config.peft_type))
        if method == "LORA" and getattr(config, "alora_invocation_tokens", None):
            method = "LORA with alora_invocation_tokens"
        if method not in IN_LAYERS:
            raise ValueError(
                "model: expected a PEFT method that lives in layers "
                f"({', '.join(IN_LAYERS)}), got {method} for the adapter {name!r}"
            )
    found: nn.Module = model.get_base_model()
    return found


def bare(module: Any) -> Any:
    """Return the module that adapters have wrapped, which holds the model's weight."""
    while True:
        for name in ("original_module", "base_layer"):
            inner = module._modules.get(name)
            if inner is not None:
                module = inner
                break
        else:
            return module


def merged(model: Any, untie: Callable[[Any], None]) -> Any:
    """Return a plain task model with the adapters added to its weights.

    The model itself stays as it is: for as long as the result is there, the weights are
    held twice.

    Args:
        model: Of peft.
        untie: Gives modules of a task model that share a weight one each, which what
            is added for one of them alone must not reach the other through.
    """
    copied = copy.deepcopy(model)
    base = copied.get_base_model()
    named = base.named_parameters(remove_duplicate=False)
    holders = collections.Counter(id(parameter) for _, parameter in named)
    wrapped = (bare(module) for module in base.modules() if bare(module) is not module)
    if any(holders[id(getattr(each, "weight", None))] > 1 for each in wrapped):
        untie(base)
    return copied.merge_and_unload()
