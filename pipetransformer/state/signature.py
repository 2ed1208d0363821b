"""What must agree between ranks before anything is built: names, shapes, config."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from pipetransformer._extension import hash_bytes
from pipetransformer.autodp import ControlPlane
from pipetransformer.autodp.told import read_json


def signature_lines(
    model: nn.Module, settings: Sequence[str], *, without: Collection[str] = ()
) -> list[str]:
    """Describe a model and its settings, one fact per line.

    Args:
        model: Parameters and buffers give name, shape and dtype. Values are not
            compared: replica 0's win.
        settings: Further lines, for example the canonical config.
        without: Names of buffers that do not count.
    """

    def lines() -> Iterator[str]:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            yield f"parameter {name} {tuple(parameter.shape)} {parameter.dtype}"
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in without:
                continue
            yield f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"
        yield from settings

    return list(lines())


def trainable_lines(model: nn.Module) -> list[str]:
    """Describe which parameters are trained, one per line."""
    return [f"trained {n}" for n, p in model.named_parameters() if p.requires_grad]


def model_signature(model: nn.Module, *, without: Collection[str] = ()) -> str:
    """Return the hash of the model's names, shapes and dtypes, as hex digits.

    Args:
        model: The model.
        without: Names of buffers that do not count.
    """
    lines = signature_lines(model, [], without=without)
    return f"{hash_bytes(chr(10).join(lines).encode()):016x}"


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    for expected, actual in zip(mine, theirs, strict=False):
        if expected != actual:
            return f"expected {expected!r} (rank 0), got {actual!r}"
    return f"expected {len(mine)} entries (rank 0), got {len(theirs)}"


def agree(plane: ControlPlane, lines: Sequence[str]) -> None:
    """Compare every rank's signature; collective over the control plane.

    Raises:
        ValueError: on every rank, naming the first rank whose model or config
            differs from rank 0's and the first entry that does.
    """
    text = json.dumps(list(lines)).encode()
    digest = f"{hash_bytes(text):016x}".encode()
    digests = plane.gather("signature", digest, phase="comparing models")
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not different:
        return
    # Only the two texts that are needed travel: they can be long.
    culprit = different[0]
    if plane.rank in (0, culprit):
        plane.publish(f"signature/text/{plane.rank}", text)
    texts = [
        read_json(
            plane.wait(f"signature/text/{rank}", phase="comparing models"),
            f"signature of rank {rank}",
        )
        for rank in (0, culprit)
    ]
    raise ValueError(
        f"model and config of rank {culprit}: "
        f"{_first_difference(texts[0], texts[1])}; every rank must build the same "
        "model and pass the same config, on nodes with as many processes each"
    )
