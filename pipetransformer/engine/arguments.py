"""Checks of what the user passes to the engine, before anything is built."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from pipetransformer.autocache import Ragged
from pipetransformer.autofreeze import (
    Guarded,
    Never,
    Policy,
    movable_boundary,
    resolve_units,
    starting_units,
)
from pipetransformer.config import Config
from pipetransformer.pipe import PipeSequential
from pipetransformer.report import Callback, Listeners
from pipetransformer.run.arguments import (
    AdaptedModel,
    EngineArguments,
    Loss,
    LossWeight,
)
from pipetransformer.skip import verify_skippables
from pipetransformer.state.state import (
    OptimizerFactory,
    SchedulerFactory,
    check_states,
    make_optimizer,
    make_scheduler,
    steps_of,
)

_LOG = logging.getLogger(__name__)
_CALL_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def check_model(model: object) -> nn.Sequential:
    """Return the model if the engine can train it.

    Raises:
        TypeError: not an ``nn.Sequential``, a compiled one, or one whose skips do not
            fit together.
        ValueError: empty, a layer twice, a forward or parameters of its own,
            `nn.SyncBatchNorm`, a lazy layer that has not run yet, a tensor on the meta
            device, a buffer that is sparse or holds one value for several places,
            nothing to train.
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
            f"model: expected an nn.Sequential, got {type(model).__name__}; "
            "pipetransformer.adapters.from_transformers makes one of a Hugging Face "
            "model, nn.Sequential(*layers) of layers of your own"
        )
    if len(model) == 0:
        raise ValueError("model: expected at least one layer, got an empty Sequential")
    if len({id(layer) for layer in model}) != len(model):
        raise ValueError("model: expected different layers, got the same one twice")
    _check_calls_layers_alone(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                "model: expected no nn.SyncBatchNorm (it needs the default process "
                f"group and silently runs as plain batch norm without it), got {name}"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"model: expected known shapes, got a lazy layer's {name}; run the "
                "model on one batch first: model(inputs)"
            )
        if tensor.is_meta:
            raise ValueError(
                f"model: expected values in all its tensors, got {name} on the meta "
                "device; call model.to_empty(device='cpu') and load its weights first"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise ValueError(
                f"model: expected buffers with all their values, got {name} of layout "
                f"{buffer.layout}, which cannot be sent to replicas or saved; make it "
                "a plain attribute of its layer"
            )
        if any(
            n > 1 and step == 0
            for n, step in zip(buffer.shape, buffer.stride(), strict=True)
        ):
            raise ValueError(
                f"model: expected buffers with memory for all their values, got {name} "
                "as `expand` makes it; register it with .contiguous()"
            )
    _check_recomputation(model)
    verify_skippables(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("model: expected a trainable parameter, got none")
    return model


def _check_calls_layers_alone(model: nn.Sequential) -> None:
    """Refuse what a Sequential does besides calling its layers; warn of its hooks.

    The engine calls the layers, in stages, and never the Sequential. An inner one is a
    layer, and called as it is.

    Raises:
        ValueError: a forward of its own, or parameters to train that no layer has.
    """
    kind = type(model)
    if (
        kind.forward not in (nn.Sequential.forward, PipeSequential.forward)
        or kind.__call__ is not nn.Module.__call__
        or "forward" in vars(model)
    ):
        raise ValueError(
            "model: expected an nn.Sequential whose layers are called one after "
            f"another, got {kind.__name__} with a forward of its own, which would not "
            "be called; make what it does besides a layer. If it does nothing else, "
            "give nn.Sequential(*model)"
        )
    of_layers = {id(p) for layer in model for p in layer.parameters()}
    for name, parameter in model.named_parameters(recurse=False):
        if parameter.requires_grad and id(parameter) not in of_layers:
            raise ValueError(
                "model: expected all parameters in its layers, got one of the "
                f"Sequential itself, {name}, which would not train; move it into the "
                "layer that uses it, or give it requires_grad=False"
            )
    if any(getattr(model, name) for name in _CALL_HOOKS):
        _LOG.warning(
            "model: expected no hooks of the Sequential itself, got some; they are not "
            "called in training, since its layers are called one after another"
        )


def _check_recomputation(model: nn.Module) -> None:
    """Refuse layers of transformers that recompute themselves, and draw.

    They put the global generators back, from which nothing draws in a pipeline: the
    second forward would have another dropout than the first.

    Raises:
        ValueError: there are such layers.
    """
    drops = any(map(_drops, model.modules()))
    for name, module in model.named_modules():
        if drops and getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                "model: expected no gradient_checkpointing with dropout, which would "
                f"differ in the recomputation, got it for {name}; call "
                "model.gradient_checkpointing_disable(), and recompute with "
                "PipeConfig(checkpoint='always')"
            )


def _drops(module: nn.Module) -> bool:
    """Tell whether a module has a dropout of its own, as one or as a number."""
    own = {name: value for name, value in vars(module).items() if "drop" in name}
    if isinstance(module, nn.modules.dropout._DropoutNd):
        own["p"] = module.p
    return any(isinstance(value, float) and value > 0 for value in own.values())


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
    loss: Loss | Literal["model"] | None,
    loss_weight: LossWeight | None,
    freeze: object,
    units: Sequence[int] | None,
    ragged: Ragged | None,
    config: Config | None,
    callbacks: Sequence[Callback] = (),
) -> EngineArguments:
    """Validate everything the engine's constructor was given.

    Raises:
        TypeError: a value of the wrong kind.
        ValueError: a value out of range.
    """
    adapted = model if isinstance(model, AdaptedModel) else None
    if adapted is not None:
        model = adapted.sequential
        units = adapted.units if units is None else units
        ragged = adapted.ragged if ragged is None else ragged
        if loss is None or loss == "model":
            own_weight = adapted.loss_weight
            loss_weight = own_weight if loss_weight is None else loss_weight
            loss = adapted.loss
    checked = on_host(check_model(model))
    if loss is None or loss == "model":
        raise TypeError(
            "loss: expected a callable loss(outputs, targets) for an nn.Sequential, "
            f"got {loss!r}; what from_transformers gives has a loss of its own"
        )
    if isinstance(loss, type):
        raise TypeError(
            "loss: expected a callable loss(outputs, targets), got the class "
            f"{loss.__name__}; make one: {loss.__name__}()"
        )
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
    if freeze is not None and not isinstance(freeze, Policy):
        kind = type(freeze).__name__
        found = f"the class {freeze.__name__}" if isinstance(freeze, type) else kind
        raise TypeError(
            "freeze: expected a policy such as pt.freeze.Guarded() or "
            f"pt.freeze.Never(), got {found}"
        )
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise TypeError(
            "callbacks: expected a sequence of pt.report.Callback, got "
            f"{type(callbacks).__name__}"
        )
    if ragged is not None and not isinstance(ragged, Ragged):
        kind = type(ragged).__name__
        raise TypeError(f"ragged: expected a Ragged or None, got {kind}")
    if config is not None and not isinstance(config, Config):
        kind = type(config).__name__
        raise TypeError(f"config: expected a Config or None, got {kind}")
    settings = config or Config()
    if settings.pipe.schedule != "gpipe":
        _check_loss_of_microbatches(loss, settings.pipe.schedule)
    unit_ends = resolve_units(len(checked), units)
    if freeze is None:
        freeze = _default_policy(checked, unit_ends, settings)
    if settings.plan.cuts is not None and not isinstance(freeze, Never):
        raise ValueError(
            "PlanConfig.cuts: expected None with a policy that freezes, got "
            f"{tuple(settings.plan.cuts)}; forced cuts begin at layer 0"
        )
    if settings.amp == "fp16":
        for name, parameter in checked.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.float16:
                raise ValueError(
                    "Config.amp='fp16': expected trainable parameters of fp32 or "
                    f"bfloat16, got fp16 for {name}; call model.float() first"
                )
    parameters = [p for p in checked.parameters() if p.requires_grad]
    if unit_ends and not isinstance(freeze, Never):
        movable, held = movable_boundary(checked, unit_ends, len(unit_ends))
        if movable == 0:
            raise ValueError(
                f"freeze: expected pt.freeze.Never() where {held}, got "
                f"{type(freeze).__name__}; or give the head a weight of its own, as "
                "from_transformers(model, untie=True) does"
            )
    # On trial: wrong ones are to be errors here, and not in a change of plan.
    trial = make_optimizer(optimizer, parameters)
    left_out = _check_parameters(trial, parameters, checked, loss)
    schedule = make_scheduler(lr_scheduler, trial) if lr_scheduler is not None else None
    if schedule is not None and settings.scheduler_interval == "epoch":
        steps_of(schedule)
    check_states(trial, schedule)
    # Forced cuts begin at layer 0.
    starting = 0 if settings.plan.cuts else starting_units(checked, unit_ends)
    freeze.bind(len(unit_ends), starting_units=starting)
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
        adapted=adapted,
        ragged=ragged,
        listeners=Listeners(callbacks),
        left_out=left_out,
    )


def _check_parameters(
    optimizer: torch.optim.Optimizer,
    given: Sequence[nn.Parameter],
    model: nn.Module,
    loss: object,
) -> list[nn.Parameter]:
    """Refuse parameters of the loss, which no replica would share; warn of others.

    Args:
        optimizer: What the factory has made.
        given: What it was given.
        model: The model.
        loss: The user's.

    Returns:
        Those that it was given and has left out.

    Raises:
        ValueError: the optimizer has a parameter of the loss that trains.
    """
    own = {id(parameter) for parameter in model.parameters()}
    losses = loss.parameters() if isinstance(loss, nn.Module) else ()
    of_loss = {id(parameter) for parameter in losses}
    others = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and id(parameter) not in own
    ]
    for parameter in others:
        if id(parameter) in of_loss:
            raise ValueError(
                "optimizer: expected the parameters that its factory is given, got one "
                f"of the loss, of shape {tuple(parameter.shape)}, which would be "
                "neither reduced nor saved: make it part of the last layer"
            )
    if others:
        _LOG.warning(
            "optimizer: %d of its parameters are not the model's, the first of shape "
            "%s; what has gradients among them is neither reduced nor saved",
            len(others),
            tuple(others[0].shape),
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [parameter for parameter in given if id(parameter) not in stepped]
    if left_out:
        _LOG.warning(
            "optimizer: %d parameters that train are in none of its groups, the first "
            "of shape %s, and never change; requires_grad=False, given to them before "
            "the engine is made, saves their gradients",
            len(left_out),
            tuple(left_out[0].shape),
        )
    return left_out


def _default_policy(
    model: nn.Sequential, unit_ends: Sequence[int], config: Config
) -> Policy:
    """Return the guarded policy, or none that freezes where nothing can freeze."""
    movable, held = movable_boundary(model, unit_ends, len(unit_ends))
    if config.plan.cuts is not None:
        held = "PlanConfig.cuts begin at layer 0"
    elif movable > 0:
        return Guarded()
    _LOG.info("freeze: nothing freezes, since %s", held or "there is one layer alone")
    return Never()


def _check_loss_of_microbatches(loss: object, schedule: str) -> None:
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ValueError(
            f"PipeConfig.schedule: expected 'gpipe' with a loss that has parameters to "
            f"train, got {schedule!r}; make {type(loss).__name__} the last layer, or "
            "freeze it"
        )
