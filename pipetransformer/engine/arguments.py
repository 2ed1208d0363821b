"""Checks of what the user passes to the engine, before anything is built."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from pipetransformer.autofreeze import Never, Policy, resolve_units
from pipetransformer.config import Config
from pipetransformer.run.arguments import EngineArguments, Loss, LossWeight
from pipetransformer.skip import verify_skippables
from pipetransformer.state.state import (
    OptimizerFactory,
    SchedulerFactory,
    make_optimizer,
)

_LOG = logging.getLogger(__name__)


def check_model(model: object) -> nn.Sequential:
    """Return the model if the engine can train it.

    Raises:
        TypeError: not an ``nn.Sequential``, a compiled one, or one whose skips do not
            fit together.
        ValueError: empty, a layer twice, `nn.SyncBatchNorm`, nothing to train.
    """
    compiled = isinstance(model, torch._dynamo.OptimizedModule) or (
        getattr(model, "_compiled_call_impl", None) is not None
    )
    if compiled:
        raise TypeError(
            "model: expected an nn.Sequential, got a compiled one; compile its layers "
            "instead: for layer in model: layer.compile()"
        )
    if not isinstance(model, nn.Sequential):
        raise TypeError(
            f"model: expected an nn.Sequential, got {type(model).__name__}; see "
            "pipetransformer.adapters for other models"
        )
    if len(model) == 0:
        raise ValueError("model: expected at least one layer, got an empty Sequential")
    if len({id(layer) for layer in model}) != len(model):
        raise ValueError("model: expected different layers, got the same one twice")
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                "model: expected no nn.SyncBatchNorm (it needs the default process "
                f"group and silently runs as plain batch norm without it), got {name}"
            )
    verify_skippables(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("model: expected a trainable parameter, got none")
    return model


def on_host(model: nn.Sequential) -> nn.Sequential:
    """Move the model to the host, with a warning when it was elsewhere."""
    devices = {str(p.device) for p in model.parameters()} - {"cpu"}
    if devices:
        _LOG.warning(
            "model: expected on cpu, got %s; moved, the engine owns placement",
            ", ".join(sorted(devices)),
        )
        model.cpu()
    return model


def check_arguments(
    model: object,
    *,
    optimizer: OptimizerFactory,
    lr_scheduler: SchedulerFactory | None,
    loss: Loss,
    loss_weight: LossWeight | None,
    freeze: object,
    units: Sequence[int] | None,
    config: Config | None,
) -> EngineArguments:
    """Validate everything the engine's constructor was given.

    Raises:
        TypeError: a value of the wrong kind.
        ValueError: a value out of range.
    """
    checked = on_host(check_model(model))
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError("optimizer: expected a factory, got a built optimizer")
    needed = {"optimizer": optimizer, "loss": loss}
    if loss_weight is not None:
        needed["loss_weight"] = loss_weight
    for name, value in needed.items():
        if not callable(value):
            kind = type(value).__name__
            raise TypeError(f"{name}: expected a callable, got {kind}")
    if lr_scheduler is not None and not callable(lr_scheduler):
        kind = type(lr_scheduler).__name__
        raise TypeError(f"lr_scheduler: expected a factory or None, got {kind}")
    if not isinstance(freeze, Policy):
        raise TypeError(
            "freeze: expected a policy such as pt.freeze.AlphaCap(alpha=1/3) or "
            f"pt.freeze.Never(), got {type(freeze).__name__}"
        )
    if config is not None and not isinstance(config, Config):
        kind = type(config).__name__
        raise TypeError(f"config: expected a Config or None, got {kind}")
    settings = config or Config()
    if settings.plan.cuts is not None and not isinstance(freeze, Never):
        raise ValueError(
            "PlanConfig.cuts: expected None with a policy that freezes, got "
            f"{tuple(settings.plan.cuts)}; forced cuts begin at layer 0"
        )
    unit_ends = resolve_units(len(checked), units)
    parameters = [p for p in checked.parameters() if p.requires_grad]
    # On trial: a wrong one is to be an error here, and not in a change of plan.
    make_optimizer(optimizer, parameters)
    freeze.bind(len(unit_ends))
    return EngineArguments(
        model=checked,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        loss=loss,
        loss_weight=loss_weight,
        policy=freeze,
        unit_ends=unit_ends,
        parameters=parameters,
        config=settings,
    )
