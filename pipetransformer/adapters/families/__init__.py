"""How the supported families of Hugging Face models are cut into layers."""

from pipetransformer.adapters.families import (
    audio,
    beit,
    chains,
    decoders,
    encoders,
    pyramids,
    seq2seq,
    t5,
    vision,
    waves,
)
from pipetransformer.adapters.families.parts import Family

FAMILIES: dict[str, Family] = {
    **encoders.FAMILIES,
    **vision.FAMILIES,
    **beit.FAMILIES,
    **pyramids.FAMILIES,
    **chains.FAMILIES,
    **audio.FAMILIES,
    **waves.FAMILIES,
    **decoders.FAMILIES,
    **seq2seq.FAMILIES,
    **t5.FAMILIES,
}
"""Families by the ``model_type`` of their configs."""

BY_CLASS: dict[str, Family] = {**audio.BY_CLASS}
"""Families by the class of the task model, where others of its kind are cut apart."""

__all__ = ["BY_CLASS", "FAMILIES", "Family"]
