"""Activations of the frozen prefix: computed once per sample, then read back."""

from pipetransformer.autocache.cache import (
    ActivationCache,
    CacheCounters,
    Records,
    hash_rows,
)
from pipetransformer.autocache.prefix import (
    cacheable,
    fingerprint_chain,
    values_context,
)
from pipetransformer.autocache.sizes import (
    record_bytes,
    slots_within,
)

__all__ = [
    "ActivationCache",
    "CacheCounters",
    "Records",
    "cacheable",
    "fingerprint_chain",
    "hash_rows",
    "record_bytes",
    "slots_within",
    "values_context",
]
