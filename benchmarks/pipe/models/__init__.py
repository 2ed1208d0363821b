"""The models of the pipeline's published benchmarks, as chains of layers."""

from pipe.models.amoebanet import amoebanet_d
from pipe.models.resnet import resnet101
from pipe.models.unet import unet

__all__ = ["amoebanet_d", "resnet101", "unet"]
