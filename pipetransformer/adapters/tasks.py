"""What the supported tasks read from a batch, and their losses.

Each loss is a mean, equal to that of the models of transformers: over the rows of a
batch, or over its tokens (`Task.weight` tells which).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
"""The target of a token that no loss is taken of, as in transformers."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        suffixes: How the names of its model classes end.
        targets: A batch's entries that are the targets; several become a tuple.
        outputs: The entries of the model's output that the last layer returns.
        loss: Takes the config, outputs and targets.
        weight: Returns how much a batch weighs in a mean over batches; None: its rows.
    """

    suffixes: tuple[str, ...]
    targets: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: Callable[[Any, Any, Any], Tensor]
    weight: Callable[[Any], Tensor] | None = None


def _class_loss(config: Any, logits: Tensor, labels: Tensor) -> Tensor:
    problem = config.problem_type
    if problem is None and config.num_labels > 1:
        kind = "multi" if labels.is_floating_point() else "single"
        problem = f"{kind}_label_classification"
    if problem == "single_label_classification":
        return functional.cross_entropy(logits, labels.reshape(-1))
    if problem == "multi_label_classification":
        return functional.binary_cross_entropy_with_logits(logits, labels)
    return functional.mse_loss(logits.reshape(labels.shape), labels)


def _token_loss(_: Any, logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED)


def _next_token_loss(_: Any, logits: Tensor, labels: Tensor) -> Tensor:
    shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    flat = logits.float().reshape(-1, logits.shape[-1])
    return functional.cross_entropy(flat, shifted.reshape(-1), ignore_index=IGNORED)


def _span_loss(_: Any, outputs: Any, targets: Any) -> Tensor:
    length = outputs[0].shape[1]  # a position beyond it was cut off: no loss of it
    ends = [
        functional.cross_entropy(
            logits, positions.reshape(-1).clamp(0, length), ignore_index=length
        )
        for logits, positions in zip(outputs, targets, strict=True)
    ]
    return (ends[0] + ends[1]) / 2


def _tokens(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def _next_tokens(labels: Tensor) -> Tensor:
    return (labels[..., 1:] != IGNORED).sum()


TASKS: dict[str, Task] = {
    "sequence-classification": Task(
        ("ForSequenceClassification",), ("labels",), ("logits",), _class_loss
    ),
    "token-classification": Task(
        ("ForTokenClassification",), ("labels",), ("logits",), _token_loss, _tokens
    ),
    "question-answering": Task(
        ("ForQuestionAnswering",),
        ("start_positions", "end_positions"),
        ("start_logits", "end_logits"),
        _span_loss,
    ),
    "image-classification": Task(
        ("ForImageClassification",), ("labels",), ("logits",), _class_loss
    ),
    "causal-lm": Task(
        ("ForCausalLM", "LMHeadModel"),
        ("labels",),
        ("logits",),
        _next_token_loss,
        _next_tokens,
    ),
}


class Given(nn.Module):
    """Stands for the base model in a task model: gives what the blocks have made.

    Args:
        tail: The base model's submodules behind its blocks: a norm, a pooler.
    """

    def __init__(self, tail: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, part in tail.items():
            self.add_module(name, part)

    def forward(self, *_: Any, hidden: Tensor, **__: Any) -> Any:
        """Return hidden states as a base model returns them."""
        from transformers.modeling_outputs import (
            BaseModelOutputWithPoolingAndCrossAttentions,
        )

        pooled = None
        for name, part in self.named_children():
            if name == "pooler":
                pooled = part(hidden)
            else:
                hidden = part(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden, pooler_output=pooled
        )


class Head(nn.Module):
    """The last layer: the task model's own forward behind the blocks.

    Args:
        model: The task model, whose base model is a `Given`.
        outputs: The entries of its output to return.
    """

    def __init__(self, model: nn.Module, outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self._outputs = outputs

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Any:
        """Return the task's outputs; one alone is no tuple."""
        found = self.model(hidden=hidden, return_dict=True)
        values = tuple(getattr(found, name) for name in self._outputs)
        return values[0] if len(values) == 1 else values
