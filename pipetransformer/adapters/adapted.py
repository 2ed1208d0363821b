"""A model of Hugging Face's transformers as a Sequential, and the way back."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.adapters.choices import Choices
from pipetransformer.adapters.families import BY_CLASS, FAMILIES, Family
from pipetransformer.adapters.families.encoders import refusal
from pipetransformer.adapters.families.heads import unused
from pipetransformer.adapters.peft_models import bare, is_peft, merged, task_model_of
from pipetransformer.adapters.tasks import TASKS, Given, Head, Task
from pipetransformer.autocache import Ragged

Batch = Mapping[str, Any]


class Adapted:
    """A task model as layers that a pipeline can be made of.

    Made by `from_transformers`. The layers hold the model's own submodules: to train
    them is to train the model.

    Args:
        model: The task model.
        sequential: The same as layers.
        family: Of the model.
        task: What it is trained for.
        adapters: The model of peft that put adapters into the task model; None: none.

    Attributes:
        model: The task model.
        sequential: Its layers: embeddings, blocks (or halves of them), head.
        units: Ends of the freeze units, for the engine: each layer before the head.
        ragged: What is padding, for the cache; None where batches have one length, or
            padded positions count in the loss (question answering).
    """

    def __init__(
        self,
        model: nn.Module,
        sequential: nn.Sequential,
        family: Family,
        task: str,
        *,
        adapters: nn.Module | None = None,
    ) -> None:
        self.model = model
        self.sequential = sequential
        self.units = list(range(1, len(sequential)))
        self.ragged = _ragged(family, task, model)
        self._names = family.inputs
        self._complete = family.complete
        self._pools_last = family.pools_last and task == "sequence-classification"
        self._task_name = task
        self._adapters = adapters
        self._untie = family.untie or _untie

    @property
    def _has_loss_of_its_own(self) -> bool:
        return "_loss_function" in vars(self.model) or not _is_of_transformers(
            self.model
        )

    @property
    def _task(self) -> Task:
        return TASKS[self._task_name]

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the arguments of the first layer from a batch.

        Args:
            batch: Tensors by name, ``(rows, ...)``, as a tokenizer or a data collator
                makes them. Without ``attention_mask`` every token counts; without
                ``token_type_ids`` all are of type 0; ``decoder_input_ids`` are made of
                ``labels``.

        Raises:
            TypeError: an input is no tensor.
            ValueError: the batch lacks an input, or has one that the layers do not
                take.
        """
        if self._complete is not None:
            batch = self._complete(self.model.config, batch)
        task, names = self._task, self._names
        others = set(batch) - {*names, *task.targets, *_UNUSED}
        if names[0] not in batch or others:
            raise ValueError(
                f"batch: expected {', '.join(names)} and, as targets, "
                f"{', '.join(task.targets)}, got {', '.join(sorted(batch))}"
            )
        for name in names:
            if not isinstance(batch.get(name, batch[names[0]]), Tensor):
                raise TypeError(
                    f"batch: expected a tensor as {name}, got "
                    f"{type(batch[name]).__name__}; give a collate_fn, such as "
                    "DataCollatorWithPadding(tokenizer)"
                )
        first: Tensor = batch[names[0]]
        if self._pools_last and "attention_mask" in batch:
            _check_padding(self.model.config, first, batch["attention_mask"])
        defaults = {"attention_mask": first.new_ones, "token_type_ids": first.new_zeros}
        return tuple(
            batch[name] if name in batch else defaults[name](first.shape)
            for name in names
        )

    def targets(self, batch: Batch) -> Tensor | tuple[Tensor, ...]:
        """Return the targets from a batch: ``labels``, or both ends of the answers.

        Raises:
            ValueError: the batch has none.
            TypeError: they are no tensors.
        """
        names = self._task.targets
        missing = [name for name in names if batch.get(name) is None]
        if missing:
            raise ValueError(
                f"batch: expected {', '.join(names)} for {self._task_name}, got "
                f"{', '.join(sorted(batch))}"
            )
        for name in names:
            if not isinstance(batch[name], Tensor):
                raise TypeError(
                    f"batch: expected a tensor as {name}, got "
                    f"{type(batch[name]).__name__}; give a collate_fn that makes one"
                )
        found = tuple(batch[name] for name in names)
        # Of tokens; labels of a decoder are of other positions than the mask.
        by_token = self.ragged is not None and self.loss_weight is not None
        checked = by_token and self._complete is None
        mask = batch.get("attention_mask") if checked else None
        if mask is not None and found[0].shape == mask.shape:
            _check_labels(found[0], mask)
        return found[0] if len(found) == 1 else found

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss that the model itself would give, a 0-dim mean.

        Raises:
            ValueError: the model has been given another one than that of transformers.
        """
        if self._has_loss_of_its_own:
            raise ValueError(
                "loss: expected the loss that transformers takes, got a model with a "
                f"forward or loss_function of its own, {type(self.model).__name__}; "
                "give the engine loss=, and loss_weight= where that is a mean of tokens"
            )
        return self._task.loss(self.model.config, outputs, targets)

    @property
    def loss_weight(self) -> Callable[[Any], Tensor] | None:
        """Return the engine's ``loss_weight``: how many tokens the loss is a mean of.

        None where it is a mean over rows.
        """
        return self._task.weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        # What loader processes need of it: no weights.
        state = self.__dict__.copy()
        config = _ConfigOnly(self.model.config)
        state.update(model=config, sequential=None, _adapters=None)
        return state

    # -- names ------------------------------------------------------------------

    def to_transformers(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state of ``sequential`` under the names of the task model.

        Raises:
            KeyError: `state` lacks an entry.
        """
        return {theirs: state[ours[0]] for theirs, ours in self._renamed().items()}

    def from_transformers(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state of the task model under the names of ``sequential``.

        Raises:
            KeyError: `state` lacks an entry.
        """
        pairs = self._renamed().items()
        return {name: state[theirs] for theirs, ours in pairs for name in ours}

    def _renamed(self) -> dict[str, list[str]]:
        ours: dict[int, list[str]] = {}
        for name, value in self.sequential.state_dict(keep_vars=True).items():
            ours.setdefault(id(value), []).append(name)
        theirs = self.model.state_dict(keep_vars=True)
        return {name: ours[id(value)] for name, value in theirs.items()}

    def export(self, folder: str | os.PathLike[str], *, merge: bool = False) -> None:
        """Write config and weights (safetensors), for ``from_pretrained``.

        The weights are those of this process: on a standby rank they are old. Of a
        model of peft the adapters alone are written, for
        ``PeftModel.from_pretrained(base, folder)``.

        Args:
            folder: Where to; made if need be.
            merge: Add the adapters to the weights of a copy and write that, a plain
                model of transformers.

        Raises:
            ValueError: to be merged, but no model of peft.
            NotADirectoryError: `folder` is a file.
        """
        if merge and self._adapters is None:
            raise ValueError(
                "merge: expected False of a model without PEFT adapters, got True"
            )
        if os.path.exists(folder) and not os.path.isdir(folder):
            # transformers logs it, and writes nothing.
            raise NotADirectoryError(
                f"folder: expected a folder's name, got a file, {os.fspath(folder)}"
            )
        model: Any = self._adapters if self._adapters is not None else self.model
        written = merged(model, self._untie) if merge else model
        with _settings_kept(self.model, written):
            written.save_pretrained(folder, **_states_apart(written))


@contextlib.contextmanager
def _settings_kept(*models: Any) -> Iterator[None]:
    """Leave the configs of models as they are: to save one writes into it.

    Layers hold it, so the activation cache would take them for others.
    """
    configs = [
        config
        for model in models
        for name in ("config", "generation_config")
        for config in _with_parts(getattr(model, name, None))
    ]
    before = [copy.copy(vars(config)) for config in configs]
    try:
        yield
    finally:
        for config, settings in zip(configs, before, strict=True):
            vars(config).clear()
            vars(config).update(settings)


def _with_parts(config: Any) -> list[Any]:
    """Return a config and those within it."""
    if not hasattr(config, "__dict__"):
        return []
    parts = [part for part in vars(config).values() if hasattr(part, "to_dict")]
    return [config, *(each for part in parts for each in _with_parts(part))]


class _ConfigOnly:
    def __init__(self, config: Any) -> None:
        self.config = config


def _states_apart(model: Any) -> dict[str, Any]:
    """Return what to save where two names share a weight that no loader would tie."""
    if getattr(model.config, "tie_word_embeddings", True) or is_peft(model):
        return {}
    state, taken = model.state_dict(), set()
    for name, value in state.items():
        state[name] = value.clone() if value.data_ptr() in taken else value
        taken.add(value.data_ptr())
    return {"state_dict": state}


def _ragged(family: Family, task: str, model: Any) -> Ragged | None:
    if family.padding is not None:
        return family.padding
    if not family.ragged or task == "question-answering":
        return None
    summary = getattr(model, "sequence_summary", None)  # of multiple choice alone
    if getattr(summary, "summary_type", "first") != "first":
        return None  # it reads padding
    place = family.inputs.index("attention_mask")
    dim = 2 if task == "multiple-choice" else 1
    lengths = functools.partial(_valid_lengths, place)
    # What layers hand on besides rows are tables of weights.
    return Ragged(lengths, dim=dim, input_dim=dim, fixed=True)


def _valid_lengths(place: int, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return where the last token of each row ends, or that of its longest choice.

    Raises:
        ValueError: the mask has not a number for each token.
    """
    mask, tokens = inputs[place] != 0, inputs[0].shape
    if mask.dim() < 2 or mask.shape != tokens[: mask.dim()]:
        raise ValueError(
            f"batch: expected an attention_mask of a number for each of the "
            f"{tuple(tokens)} tokens, got shape {tuple(mask.shape)}"
        )
    ends = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    return (mask * ends).flatten(1).amax(1)


def _check_padding(config: Any, ids: Tensor, mask: Tensor) -> None:
    """Raise a ValueError where a decoder would classify by padding."""
    pad = config.get_text_config().pad_token_id
    places = torch.arange(ids.shape[1], device=ids.device)
    behind = places >= _valid_lengths(0, (mask,))[:, None]
    if pad is not None and bool((behind & (ids != pad)).any()):
        raise ValueError(
            f"batch: expected config.pad_token_id={pad} behind the end of a row, got "
            "other tokens, by which the model would classify; set it to the "
            "tokenizer's pad_token_id"
        )


@functools.cache
def _warn_of_labels() -> None:
    _LOG.warning(
        "labels: expected %d at padding, got others; they count in the loss as the "
        "model computes it, but the activation cache keeps nothing of padded positions",
        _IGNORED,
    )


def _check_labels(labels: Tensor, mask: Tensor) -> None:
    if bool(((labels != _IGNORED) & (mask == 0)).any()):
        _warn_of_labels()


_LOG = logging.getLogger(__name__)
_IGNORED = -100

_OLDEST = 5, 10

_UNUSED = ("special_tokens_mask", "length")
"""Entries of a tokenizer's batch that no model takes."""


def from_transformers(
    model: nn.Module,
    *,
    task: str | None = None,
    split_blocks: bool = False,
    untie: bool = False,
) -> Adapted:
    """Return a task model of Hugging Face's transformers as layers of a pipeline.

    docs/huggingface.md lists the families and tasks. Nothing is copied; outputs and
    gradients are those of the model.

    A ``peft.PeftModel`` of such a model is taken as it is, if its adapters live in
    layers (LoRA, IA3 and others): its base weights do not train, and layers before the
    first adapter are frozen from the start.

    Args:
        model: From ``AutoModelFor<task>.from_pretrained``, on the CPU, or what
            ``peft.get_peft_model`` makes of it.
        task: One of `tasks.TASKS`, such as ``"sequence-classification"`` or
            ``"causal-lm"``, to make sure of it; None: what the model's class is for.
        split_blocks: Make two layers of each block, attention and MLP, as the paper
            counts them, instead of one. Blocks in which both read the same hidden
            states stay whole, as do those of convolutions and of models in stages.
        untie: Give heads, and embeddings of decoders, that share the weight of the
            embeddings copies of their own. While they share it nothing can freeze.

    Raises:
        ImportError: transformers is older than 5.10, whose models are made otherwise.
        TypeError: `model` is no model of transformers.
        ValueError: the family, task or PEFT method is not supported, or the model is
            not for the task.
    """
    adapters = model if is_peft(model) else None
    if adapters is not None:
        model = task_model_of(adapters)
    family, task = _supported(model, task)
    base: Any = model.base_model
    if untie:
        if any(getattr(m, "token_adapter", None) is not None for m in model.modules()):
            raise ValueError(
                "untie: expected False with trainable_token_indices, whose tokens peft "
                "adds to the weight that is shared; train the embeddings and the head "
                "as modules_to_save instead"
            )
        (family.untie or _untie)(model)
    unused(*_tables_of_sines(model))
    if task == "masked-lm":
        unused(*_spare_biases(model))
    layers: list[nn.Module] = [family.embed(base)]
    for index, block in enumerate(family.blocks(base)):
        if split_blocks and family.halves is not None:
            layers.extend(family.halves(base, block, index))
        else:
            layers.append(family.whole(base, block, index))
    if task == "multiple-choice":
        layers = [Choices(layer, 2 if k else None) for k, layer in enumerate(layers)]
    layers.append(_head(model, family, TASKS[task]))
    sequential = nn.Sequential(*layers)
    sequential.train(model.training)
    _check_whole(model, sequential)
    return Adapted(model, sequential, family, task, adapters=adapters)


def _supported(model: nn.Module, task: str | None) -> tuple[Family, str]:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None or not hasattr(model, "base_model"):
        raise TypeError(
            "model: expected one of transformers, such as "
            f"AutoModelForSequenceClassification gives, got {type(model).__name__}"
        )
    _check_version()
    family = BY_CLASS.get(type(model).__name__, FAMILIES.get(kind))
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"model: {reason}")
    base: Any = model.base_model
    if not _is_of_transformers(base) or (
        family is not None and family.head and not _is_of_transformers(model)
    ):
        part = model if _is_of_transformers(base) else base
        raise ValueError(
            f"model: expected the forward of transformers, got {type(part).__name__} "
            f"with that of {type(part).forward.__module__}, which no layer would call; "
            "write the layers as an nn.Sequential: docs/own-model.md"
        )
    if family is None:
        raise ValueError(
            "model: expected one of the families that docs/huggingface.md lists, got "
            f"{kind}; for another one write the layers as an nn.Sequential: "
            "docs/own-model.md"
        )
    name = type(model).__name__
    own = [n for n, t in TASKS.items() if name.endswith(t.suffixes)]
    if not own or own[0] not in family.tasks:
        raise ValueError(
            f"model: expected a {kind} for {' or '.join(family.tasks)}, got {name}; "
            "for another head write the layers as an nn.Sequential: docs/own-model.md"
        )
    if task is not None and task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    if task is not None and task != own[0]:
        raise ValueError(f"task: expected {own[0]} of a {name}, got {task}")
    if getattr(config, "is_decoder", False) and own[0] != "causal-lm":
        raise ValueError("model: expected an encoder, got config.is_decoder=True")
    return family, own[0]


def _is_of_transformers(model: nn.Module) -> bool:
    return type(model).forward.__module__.startswith("transformers.")


def _check_whole(model: nn.Module, sequential: nn.Sequential) -> None:
    held = set(map(id, sequential.parameters()))
    for name, parameter in model.named_parameters():
        if id(parameter) not in held:
            raise ValueError(
                f"model: expected each parameter in a layer, got {name}, which no "
                "layer uses; please report this configuration"
            )


def _check_version() -> None:
    found = metadata.version("transformers")
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST:
        raise ImportError(
            f"transformers: expected {'.'.join(map(str, _OLDEST))} or newer, got "
            f"{found}; pip install 'transformers>={'.'.join(map(str, _OLDEST))}'"
        )


def _untie(model: Any) -> None:
    head = model.get_output_embeddings()
    if head is None:
        return
    head, embeddings = bare(head), bare(model.get_input_embeddings())
    if head.weight is embeddings.weight:
        own, trains = head.weight.detach().clone(), head.weight.requires_grad
        head.weight = nn.Parameter(own, requires_grad=trains)
        model.config.tie_word_embeddings = False


def _tables_of_sines(model: nn.Module) -> list[nn.Module]:
    """Return embeddings of positions that are read without a gradient.

    They do not train where a model is made, but do after ``from_pretrained``.
    """
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("SinusoidalPositionalEmbedding")
    ]


def _spare_biases(model: nn.Module) -> list[nn.Parameter]:
    """Return what heads of untied weights hold besides their decoder's bias.

    transformers has one parameter under both names while the weight is shared.
    """
    found = []
    for module in model.modules():
        spare = getattr(module, "bias", None)
        used = getattr(getattr(module, "decoder", None), "bias", None)
        if isinstance(spare, nn.Parameter) and isinstance(used, nn.Parameter):
            found += [spare] if spare is not used else []
    return found


def _head(model: Any, family: Family, task: Task) -> nn.Module:
    if family.head is not None:
        return family.head(model)
    base = model.base_model
    tail = {
        name: functools.reduce(_part, name.split("."), base) for name in family.tail
    }
    parts = {n.rpartition(".")[2]: part for n, part in tail.items() if part is not None}
    own = copy.copy(model)
    own._modules = dict(model._modules)
    own._modules[model.base_model_prefix] = Given(parts)
    return Head(own, task.outputs)


def _part(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


__all__: Sequence[str] = ("Adapted", "from_transformers")
