"""Room ``compat``: the pipeline under the import names of removed packages."""

from pipetransformer.compat.install import install

__all__ = ["install"]
