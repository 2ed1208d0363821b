"""What the supported tasks read from a batch, and their losses.

Each loss is a mean, equal to that of the models of transformers: over the rows of a
batch, or over its tokens (`Task.weight` tells which).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetransformer.adapters.families import FAMILIES

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
    if config.model_type in _WAVES:  # whatever else the config says
        return _mean_where_any(logits, labels.reshape(-1), IGNORED)
    if problem is None and config.model_type in _DEBERTA:
        return _deberta_class_loss(config, logits, labels)
    if problem is None and config.num_labels > 1:
        kind = "multi" if labels.is_floating_point() else "single"
        problem = f"{kind}_label_classification"
    if problem == "single_label_classification":
        return _mean_where_any(logits, labels.reshape(-1), IGNORED)
    if problem == "multi_label_classification":
        return functional.binary_cross_entropy_with_logits(logits, labels)
    return functional.mse_loss(logits.reshape(labels.shape), labels)


def _mean_where_any(logits: Tensor, wanted: Tensor, ignored: int) -> Tensor:
    """Return the mean cross entropy of rows that count; 0 where a part has none.

    A mean over none is NaN. Nothing waits for the device, and no other bit changes.
    """
    some = (wanted != ignored).any()
    wanted = torch.where(some, wanted, torch.zeros_like(wanted))
    return functional.cross_entropy(logits, wanted, ignore_index=ignored) * some


def _deberta_class_loss(config: Any, logits: Tensor, labels: Tensor) -> Tensor:
    if config.num_labels == 1:
        flat = logits.reshape(-1).to(labels.dtype)
        return functional.mse_loss(flat, labels.reshape(-1))
    if labels.dim() == 1 or labels.shape[-1] == 1:
        wanted = labels.reshape(-1).long()
        wanted = wanted.masked_fill(wanted < 0, IGNORED)  # as that model has it
        return _mean_where_any(logits.float(), wanted, IGNORED)
    return -(functional.log_softmax(logits, -1) * labels).sum(-1).mean()


def _choice_loss(_: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return _mean_where_any(logits, labels, IGNORED)


def _masked_loss(config: Any, logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    if FAMILIES[config.model_type].fp32_masked_loss:
        flat = flat.float()
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED)


def _token_loss(config: Any, logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    if FAMILIES[config.model_type].fp32_token_loss:
        flat = flat.float()
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED)


def _next_token_loss(_: Any, logits: Tensor, labels: Tensor) -> Tensor:
    shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    flat = logits.float().reshape(-1, logits.shape[-1])
    return functional.cross_entropy(flat, shifted.reshape(-1), ignore_index=IGNORED)


def _span_loss(_: Any, outputs: Any, targets: Any) -> Tensor:
    length = outputs[0].shape[1]  # a position beyond it was cut off: no loss of it
    ends = [
        _mean_where_any(logits, positions.reshape(-1).clamp(0, length), length)
        for logits, positions in zip(outputs, targets, strict=True)
    ]
    return (ends[0] + ends[1]) / 2


def _ctc_loss(config: Any, outputs: Any, labels: Tensor) -> Tensor:
    logits, lengths = outputs
    there, words = labels >= 0, logits.shape[-1]
    if int(labels.max()) >= words:
        raise ValueError(
            f"labels: expected ids below {words} (config.vocab_size), got "
            f"{int(labels.max())}"
        )
    chances = functional.log_softmax(logits, dim=-1, dtype=torch.float32)
    with torch.backends.cudnn.flags(enabled=False):  # as in transformers
        return functional.ctc_loss(
            chances.transpose(0, 1),
            labels.masked_select(there),
            lengths,
            there.sum(-1),
            blank=config.pad_token_id,
            zero_infinity=config.ctc_zero_infinity,
        )


def _tokens(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def _next_tokens(labels: Tensor) -> Tensor:
    return (labels[..., 1:] != IGNORED).sum()


_DEBERTA = ("deberta", "deberta-v2")
_WAVES = (
    *("wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "hubert", "wavlm", "sew"),
    *("unispeech", "unispeech-sat", "data2vec-audio"),
)

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
    "masked-lm": Task(
        ("ForMaskedLM",), ("labels",), ("logits",), _masked_loss, _tokens
    ),
    "multiple-choice": Task(
        ("ForMultipleChoice",), ("labels",), ("logits",), _choice_loss
    ),
    "image-classification": Task(
        ("ForImageClassification",), ("labels",), ("logits",), _class_loss
    ),
    "video-classification": Task(
        ("ForVideoClassification",), ("labels",), ("logits",), _class_loss
    ),
    "audio-classification": Task(
        ("ForAudioClassification",), ("labels",), ("logits",), _class_loss
    ),
    "ctc": Task(("ForCTC",), ("labels",), ("logits", "lengths"), _ctc_loss),
    "causal-lm": Task(
        ("ForCausalLM", "LMHeadModel"),
        ("labels",),
        ("logits",),
        _next_token_loss,
        _next_tokens,
    ),
    "seq2seq-lm": Task(
        ("ForConditionalGeneration", "MarianMTModel"),
        ("labels",),
        ("logits",),
        _token_loss,
        _tokens,
    ),
}


_HELD = ("contact_head", "rotary_embeddings")
"""Of a base model (ESM), but not called by it: for its state alone."""


class Given(nn.Module):
    """Stands for the base model in a task model: gives what the blocks have made.

    Args:
        tail: The base model's submodules behind its blocks: a norm, a pooler.
    """

    def __init__(self, tail: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, part in tail.items():
            self.add_module(name, part)

    @property
    def decoder(self) -> Given:
        """Stand for the base model's decoder as well, which OPT's task model calls."""
        return self

    def forward(
        self,
        *_: Any,
        hidden: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **__: Any,
    ) -> Any:
        """Return hidden states as a base model returns them."""
        from transformers.modeling_outputs import (
            BaseModelOutputWithPoolingAndCrossAttentions,
        )

        hidden = inputs_embeds if hidden is None else hidden
        pooled = None
        for name, part in self.named_children():
            if name == "pooler":
                pooled = part(hidden)
            elif name not in _HELD:
                hidden = part(hidden)
        found = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden, pooler_output=pooled
        )
        # What task models look for: of experts, of Gemma 4, of Mamba before 5.24.
        found.router_logits = found.shared_kv_states = found.cache_params = None
        return found


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
        # Not every task model hands on to its base model what it does not know itself.
        known = inspect.signature(model.forward).parameters
        self._entry = "inputs_embeds" if "inputs_embeds" in known else "hidden"
        self._masks = "attention_mask" in known
        self._pools = type(model).__name__.endswith("ForSequenceClassification")

    def forward(
        self, hidden: Tensor, padding: Tensor | None = None, table: Any = None
    ) -> Any:
        """Return the task's outputs; one alone is no tuple.

        Args:
            hidden: ``(rows, length, width)``, what the blocks have made.
            padding: ``(rows, length)``, as `families.parts.State` has it.
            table: What the blocks of some encoders read; not used.

        Raises:
            ValueError: a decoder that classifies sequences without a padding token.
        """
        given: dict[str, Any] = {self._entry: hidden}
        if self._pools and padding is not None and padding.dtype == torch.uint8:
            given["input_ids"] = self._stand_ins(padding)
        if self._masks and padding is not None and padding.dtype == torch.bool:
            # For encoders that pool the mean.
            given["attention_mask"] = padding.long().contiguous()
        found = self.model(return_dict=True, **given)
        values = tuple(getattr(found, name) for name in self._outputs)
        return values[0] if len(values) == 1 else values

    def _stand_ins(self, padding: Tensor) -> Tensor:
        """Return ids from which a decoder tells the last token that is no padding."""
        config: Any = self.model.config
        pad = config.get_text_config().pad_token_id
        if pad is None:
            raise ValueError(
                "model: expected config.pad_token_id, since a decoder classifies by "
                "the last token that is not padding, got None; set it to the "
                "tokenizer's pad_token_id"
            )
        return torch.where(padding == 1, pad + 1, pad)
