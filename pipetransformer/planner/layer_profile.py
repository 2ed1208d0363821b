"""Measured costs of a model's layers, as the planner reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipetransformer.core import wire

_TIMES = ("forward_ns", "input_grad_ns", "weight_grad_ns")
_BYTES = (
    "parameter_bytes",
    "activation_bytes_per_sample",
    "weight_grad_activation_bytes_per_sample",
    "boundary_bytes_per_sample",
)
_FURTHER = (  # left out of the text if 0
    "activation_bytes_per_microbatch",
    "shared_activation_bytes",
    "optimizer_ns",
)
_PAIRS = ("tied_layers", "skips")  # of layers; left out of the text if empty


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Costs of one layer; times hold one entry per micro-batch size.

    Args:
        name: for people, such as ``"4.Block"``.
        forward_ns: forward pass, ns.
        input_grad_ns: backward pass to the inputs, ns.
        weight_grad_ns: what the gradients of the parameters add, ns; adding them to
            those of earlier micro-batches is part of it.
        parameter_bytes: parameters, those shared with an earlier layer excluded.
        activation_bytes_per_sample: held from forward to backward.
        weight_grad_activation_bytes_per_sample: still held between the two halves
            of a split backward.
        boundary_bytes_per_sample: what later layers need of this and earlier ones.
        trainable: False if the user froze the layer or it has no parameters.
        forward_only_ns: forward pass without gradients, ns; default ``forward_ns``.
        trainable_bytes: of ``parameter_bytes`` those of parameters that train: the
            others have neither gradients nor optimizer state, and no replica tells
            another of them. Default: all, or none if the layer is not trainable.
        activation_bytes_per_microbatch: held from forward to backward of each
            micro-batch besides, however many rows it has.
        shared_activation_bytes: held once in a step, for all its micro-batches.
        optimizer_ns: the optimizer's step over them, ns; 0: not measured.
        optimizer_bytes: the optimizer's state for those that train. None: not measured.

    Raises:
        ValueError: a field has a wrong type or is negative.
    """

    name: str
    forward_ns: tuple[int, ...]
    input_grad_ns: tuple[int, ...]
    weight_grad_ns: tuple[int, ...]
    parameter_bytes: int
    activation_bytes_per_sample: int
    weight_grad_activation_bytes_per_sample: int
    boundary_bytes_per_sample: int
    trainable: bool = True
    forward_only_ns: tuple[int, ...] | None = None
    trainable_bytes: int | None = None
    activation_bytes_per_microbatch: int = 0
    shared_activation_bytes: int = 0
    optimizer_ns: int = 0
    optimizer_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        longest = wire.LONGEST_NAME
        name = wire.check_str(self.name, "profile layer name", longest=longest)
        where = f"profile layer {wire.shown(name)}"
        optional = () if self.forward_only_ns is None else ("forward_only_ns",)
        for field in (*_TIMES, *optional):
            checked = wire.check_ints(getattr(self, field), f"{where} {field}")
            object.__setattr__(self, field, checked)
        for field in (*_BYTES, *_FURTHER):
            wire.check_int(getattr(self, field), f"{where} {field}")
        wire.check_bool(self.trainable, f"{where} trainable")
        if self.optimizer_bytes is not None:
            wire.check_int(self.optimizer_bytes, f"{where} optimizer_bytes")
        if self.trainable_bytes is not None:
            most = self.parameter_bytes if self.trainable else 0
            found = wire.check_int(self.trainable_bytes, f"{where} trainable_bytes")
            if found > most:
                raise ValueError(
                    f"{where} trainable_bytes: expected 0 to {most}, got {found}"
                )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the parameters that train, and so of their gradients."""
        if self.trainable_bytes is not None:
            return self.trainable_bytes
        return self.parameter_bytes if self.trainable else 0

    def to_dict(self) -> dict[str, object]:
        """Return the layer as JSON-ready values."""
        fields: dict[str, object] = {"name": self.name, "trainable": self.trainable}
        fields.update({field: list(getattr(self, field)) for field in _TIMES})
        fields.update({field: getattr(self, field) for field in _BYTES})
        if self.forward_only_ns is not None:
            fields["forward_only_ns"] = list(self.forward_only_ns)
        if self.trainable_bytes is not None:
            fields["trainable_bytes"] = self.trainable_bytes
        if self.optimizer_bytes is not None:
            fields["optimizer_bytes"] = self.optimizer_bytes
        fields.update(
            {field: value for field in _FURTHER if (value := getattr(self, field))}
        )
        return fields

    @classmethod
    def from_dict(cls, value: object, what: str) -> LayerProfile:
        """Read a layer; ``what`` names it in errors."""
        required = ("name", *_TIMES, *_BYTES, "trainable")
        fields = wire.read_object(
            value,
            what,
            required=required,
            optional=(
                "forward_only_ns",
                "trainable_bytes",
                "optimizer_bytes",
                *_FURTHER,
            ),
        )
        return cls(**fields)  # type: ignore[arg-type]  # checked by __post_init__


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of all layers of a model at several micro-batch sizes.

    Args:
        name: of the model, for people.
        microbatch_samples: increasing micro-batch sizes; between and beyond them
            costs are affine. With one size, costs are proportional to the rows.
        layers: one entry per element of the ``nn.Sequential``, not empty.
        tied_layers: pairs of layers that share a parameter; no cut may separate
            them.
        skips: pairs of layers of which the second pops what the first stashes. Cuts
            may separate them, a boundary may not: frozen activations are kept
            without skips.

    Raises:
        ValueError: a field is malformed; the text names it.
    """

    name: str
    microbatch_samples: tuple[int, ...]
    layers: tuple[LayerProfile, ...]
    tied_layers: tuple[tuple[int, int], ...] = ()
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Check every field."""
        wire.check_str(self.name, "profile name", longest=wire.LONGEST_NAME)
        sizes = wire.check_ints(self.microbatch_samples, "profile microbatch_samples")
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(
                "profile microbatch_samples: expected increasing sizes from 1, got "
                f"{wire.shown(list(sizes))}"
            )
        layers = wire.check_tuple(self.layers, "profile layers", _check_layer)
        if not layers:
            raise ValueError("profile layers: expected at least one layer, got none")
        for i, layer in enumerate(layers):
            _check_lengths(layer, i, len(sizes))
        object.__setattr__(self, "microbatch_samples", sizes)
        object.__setattr__(self, "layers", layers)
        for field in _PAIRS:
            pairs = _check_pairs(getattr(self, field), f"profile {field}", len(layers))
            object.__setattr__(self, field, pairs)

    def may_be_boundary(self, boundary: int) -> bool:
        """Tell whether no skip goes past the boundary: layers below it may freeze."""
        return not any(first < boundary <= second for first, second in self.skips)

    @property
    def hash(self) -> int:
        """64-bit hash of the content: equal on ranks that hold equal profiles."""
        return wire.content_hash(self.to_dict())

    def to_dict(self) -> dict[str, object]:
        """Return the profile as JSON-ready values."""
        fields: dict[str, object] = {
            "version": 1,
            "name": self.name,
            "microbatch_samples": list(self.microbatch_samples),
            "layers": [layer.to_dict() for layer in self.layers],
        }
        for field in _PAIRS:
            if pairs := getattr(self, field):
                fields[field] = [list(pair) for pair in pairs]
        return fields

    def to_json(self) -> str:
        """Return canonical JSON text, equal for equal profiles."""
        return wire.canonical(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile.

        Args:
            text: JSON in the format of :meth:`to_json`.

        Returns:
            The profile.

        Raises:
            ValueError: malformed text, a missing, unknown or wrong field (named).
        """
        fields = wire.read_object(
            wire.parse(text, "profile"),
            "profile",
            required=("name", "microbatch_samples", "layers"),
            optional=_PAIRS,
            version=1,
        )
        layers = fields["layers"]
        fields["layers"] = wire.check_tuple(
            layers, "profile layers", LayerProfile.from_dict
        )
        return cls(**fields)  # type: ignore[arg-type]  # checked by __post_init__


def _check_pairs(
    value: object, what: str, num_layers: int
) -> tuple[tuple[int, int], ...]:
    pairs = wire.check_tuple(value, what, wire.check_ints)
    for pair in pairs:
        if len(pair) != 2 or not pair[0] < pair[1] < num_layers:
            raise ValueError(
                f"{what}: expected pairs of increasing layer indices below "
                f"{num_layers}, got {wire.shown(list(pair))}"
            )
    return tuple((pair[0], pair[1]) for pair in pairs)


def _check_layer(value: object, what: str) -> LayerProfile:
    if not isinstance(value, LayerProfile):
        raise ValueError(f"{what}: expected a LayerProfile, got {wire.shown(value)}")
    return value


def _check_lengths(layer: LayerProfile, index: int, num_sizes: int) -> None:
    times: Mapping[str, tuple[int, ...] | None] = {
        "forward_ns": layer.forward_ns,
        "input_grad_ns": layer.input_grad_ns,
        "weight_grad_ns": layer.weight_grad_ns,
        "forward_only_ns": layer.forward_only_ns,
    }
    for field, values in times.items():
        if values is not None and len(values) != num_sizes:
            raise ValueError(
                f"profile layers[{index}] {field}: expected one entry per micro-batch "
                f"size ({num_sizes}), got {len(values)}"
            )
