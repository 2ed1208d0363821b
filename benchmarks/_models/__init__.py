"""The models of the pipeline's published benchmarks, as chains of layers."""

from _models.amoebanet import amoebanet_d
from _models.resnet import resnet101
from _models.unet import unet

__all__ = ["amoebanet_d", "resnet101", "unet"]
