"""Stands for ``torchgpipe.__version__``, the module: the version whose API this is."""

__version__ = "0.0.7"
