"""How the supported families of Hugging Face models are cut into layers."""

from pipetransformer.adapters.families import decoders, encoders, vision
from pipetransformer.adapters.families.parts import Family

FAMILIES: dict[str, Family] = {
    **encoders.FAMILIES,
    **vision.FAMILIES,
    **decoders.FAMILIES,
}
"""Families by the ``model_type`` of their configs."""

__all__ = ["FAMILIES", "Family"]
