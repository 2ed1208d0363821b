"""Models with an encoder and a decoder: text to text, and speech to text.

Layers are the encoder's embeddings, its blocks (its norm with the last of them), the
bridge, which embeds the decoder's tokens, the decoder's blocks and the head. What
travels between them, in this order, are the arguments of each layer:

* ``source`` ``(rows, source length, width)``: the encoder's hidden states, behind its
  last block its outputs;
* ``target``: up to the bridge the decoder's token ids ``(rows, target length)``, behind
  it hidden states ``(rows, target length, width)``;
* ``target_mask`` ``(rows, target length)`` bool, True at tokens;
* of text ``source_mask`` ``(rows, source length)`` bool;
* of T5 ``table`` ``(rows, buckets, heads)``: the biases by relative position of the
  stack at hand. All blocks of a stack use this parameter of the first one, so its value
  travels, once per row: rows can be divided and cached, and gradients come back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipetransformer.adapters.families.parts import Attention
from pipetransformer.adapters.peft_models import bare

State = tuple[Tensor, ...]
"""What travels between layers, see above."""

Batch = Mapping[str, Any]


class Start(nn.Module):
    """The first layer: embeds what the encoder takes.

    Args:
        parts: Submodules of the model that `call` uses, by name.
        call: Takes the layer and the encoder's tensor, token ids or features.
    """

    def __init__(
        self, parts: dict[str, nn.Module], call: Callable[[Any, Tensor], Tensor]
    ) -> None:
        super().__init__()
        _take(self, parts)
        self._call = call

    def forward(
        self,
        inputs: Tensor,
        target: Tensor,
        target_mask: Tensor,
        lengths: Tensor,
        source_mask: Tensor | None = None,
    ) -> State:
        """Embed a batch; the lengths are for the cache alone."""
        source = self._call(self, inputs)
        masks = _own_mask(target_mask), _own_mask(source_mask)
        return _state(source, target, *masks, _table(self, source))


class EncoderBlock(nn.Module):
    """A block of the encoder, or a half of it.

    Args:
        parts: Submodules of the model that `call` uses, by name. ``end``: what the
            encoder does behind its last block.
        call: Takes the layer, hidden states, the attention's mask and the table.
        config: The encoder's, by which masks are made.
    """

    def __init__(
        self, parts: dict[str, nn.Module], call: Callable[..., Tensor], config: Any
    ) -> None:
        super().__init__()
        _take(self, parts)
        self._call = call
        self.attention_mask = Attention(config, "bidirectional")

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        target_mask: Tensor,
        source_mask: Tensor | None = None,
        table: Tensor | None = None,
    ) -> State:
        """Run the block; all but the source is handed on as it is."""
        mask = None
        if source_mask is not None:
            mask = self.attention_mask.mask(source, source_mask)
        source = self._call(self, source, mask, table)
        end = getattr(self, "end", None)
        source = source if end is None else end(source)
        return _state(source, target, target_mask, source_mask, table)


class Bridge(nn.Module):
    """The layer between encoder and decoder: embeds the decoder's tokens.

    Args:
        parts: Submodules of the model that `call` uses, by name.
        call: Takes the layer and token ids.
    """

    def __init__(
        self, parts: dict[str, nn.Module], call: Callable[[Any, Tensor], Tensor]
    ) -> None:
        super().__init__()
        _take(self, parts)
        self._call = call

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        target_mask: Tensor,
        source_mask: Tensor | None = None,
        _: Tensor | None = None,
    ) -> State:
        """Embed the target; the decoder's table takes the place of the encoder's."""
        target = self._call(self, target)
        return _state(source, target, target_mask, source_mask, _table(self, target))


class CrossMask(nn.Module):
    """Gives a decoder's blocks the mask that the model makes of the source's padding.

    Args:
        config: The decoder's.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def mask(self, target: Tensor, source: Tensor, padding: Tensor) -> Any:
        """Return what the attention of a block takes; made once per micro-batch.

        Args:
            target: ``(rows, target length, width)``; only its form is used.
            source: ``(rows, source length, width)``; likewise.
            padding: ``(rows, source length)`` bool, True at tokens. It carries what was
                made of it to the next layer of the same stage.
        """
        key = ("cross", target.dtype, self.config._attn_implementation)
        made: dict[Any, Any] = padding.__dict__.setdefault("_masks", {})
        if key not in made:
            from transformers.masking_utils import create_bidirectional_mask

            made[key] = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=target.detach(),
                attention_mask=padding,
                encoder_hidden_states=source.detach(),
            )
        return made[key]


class DecoderBlock(nn.Module):
    """A block of the decoder, or a half of it.

    Args:
        parts: Submodules of the model that `call` uses, by name.
        call: Takes the layer, hidden states, their mask, the encoder's outputs, their
            mask and the table.
        config: The decoder's, by which masks are made.
    """

    def __init__(
        self, parts: dict[str, nn.Module], call: Callable[..., Tensor], config: Any
    ) -> None:
        super().__init__()
        _take(self, parts)
        self._call = call
        self.attention_mask = Attention(config, "causal")
        self.cross_mask = CrossMask(config)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        target_mask: Tensor,
        source_mask: Tensor | None = None,
        table: Tensor | None = None,
    ) -> State:
        """Run the block; all but the target is handed on as it is."""
        mask = self.attention_mask.mask(target, target_mask)
        cross = None
        if source_mask is not None:
            cross = self.cross_mask.mask(target, source, source_mask)
        target = self._call(self, target, mask, source, cross, table)
        return _state(source, target, target_mask, source_mask, table)


class Decoded(nn.Module):
    """Stands in a task model for what runs before its head.

    Args:
        ends: Submodules behind the decoder's blocks, in order.
        gives: Name of the class of transformers that the model expects.
    """

    def __init__(self, ends: Sequence[nn.Module], gives: str) -> None:
        super().__init__()
        self.ends = nn.ModuleList(ends)
        self._gives = gives

    def forward(self, *_: Any, **given: Any) -> Any:
        """Return hidden states, given as the decoder's embeddings."""
        from transformers import modeling_outputs

        hidden = given.get("decoder_inputs_embeds")
        hidden = given.get("inputs_embeds") if hidden is None else hidden
        for end in self.ends:
            hidden = end(hidden)
        return getattr(modeling_outputs, self._gives)(last_hidden_state=hidden)


class Seq2SeqHead(nn.Module):
    """The last layer: the task model's own forward behind the decoder's blocks.

    Args:
        model: The task model, in which a `Decoded` stands for all before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor, *_: Tensor) -> Any:
        """Return logits ``(rows, target length, vocabulary)``."""
        found = self.model(
            encoder_outputs=(source,),
            decoder_inputs_embeds=target,
            use_cache=False,
            return_dict=True,
        )
        return found.logits


def _take(layer: nn.Module, parts: dict[str, nn.Module]) -> None:
    for name, part in parts.items():
        layer.add_module(name, part)


def _state(*parts: Tensor | None) -> State:
    return tuple(part for part in parts if part is not None)


def _own_mask(mask: Tensor | None) -> Tensor | None:
    # An object of its own, which carries what is made of it: the caller may change
    # the batch's, or give it to another model.
    if mask is None:
        return None
    mask = mask.bool()
    return mask.view_as(mask)


def _table(own: nn.Module, like: Tensor) -> Tensor | None:
    """Return a layer's biases by relative position, once for each row; None: none."""
    table = getattr(own, "table", None)
    if table is None:
        return None
    weight: Tensor = table.weight
    return weight.unsqueeze(0).repeat(len(like), 1, 1)


def replaced(module: Any, **parts: nn.Module | None) -> Any:
    """Return a module with other submodules of these names; None: without."""
    own = copy.copy(module)
    own._modules = {**module._modules, **parts}
    for name, part in parts.items():
        if part is None:
            del own._modules[name]
    return own


# -- tied weights ----------------------------------------------------------------


_ALWAYS_TIED = ("mt5", "t5", "umt5")
"""Configs that say so of every model: by the flag T5 told how outputs are scaled. A
loader ties what is saved once, or saved with equal values."""


def untie_seq2seq(model: Any) -> None:
    """Give the decoder's embeddings and the head weights of their own.

    The shared embedding of the model stays that of its encoder.
    """
    taken: set[int] = set()
    for stack in (model.base_model.encoder, model.base_model.decoder):
        tokens = getattr(stack, "embed_tokens", None)
        if tokens is None:  # an encoder of speech
            continue
        if id(bare(tokens).weight) in taken:
            stack.embed_tokens = tokens = copy.deepcopy(tokens)
        taken.add(id(bare(tokens).weight))
    head = bare(model.get_output_embeddings())
    if id(head.weight) in taken:
        own, trains = head.weight.detach().clone(), head.weight.requires_grad
        head.weight = nn.Parameter(own, requires_grad=trains)
    if model.config.model_type not in _ALWAYS_TIED:
        model.config.tie_word_embeddings = False


def share_with_encoder(base: Any) -> None:
    """Make the shared embedding that of the encoder, if no forward reads it.

    So it is where embeddings are not tied. What trains is then what
    ``get_input_embeddings`` gives, and each parameter of the model is in a layer.
    """
    shared = getattr(base, "shared", None)
    if shared is None:
        return
    tokens = base.encoder.embed_tokens
    if shared.weight is not tokens.weight:
        shared.weight = tokens.weight
