"""Activations of the frozen prefix: computed once per sample, then read back."""

from pipetransformer.autocache.cache import (
    ActivationCache,
    CacheCounters,
    Records,
    hash_ragged_rows,
    hash_rows,
)
from pipetransformer.autocache.folder import (
    CacheFile,
    CacheFolder,
    cache_files,
    damaged_records,
)
from pipetransformer.autocache.prefix import (
    cacheable,
    fingerprint_chain,
    values_context,
)
from pipetransformer.autocache.ragged import Ragged, RaggedRows, valid_part
from pipetransformer.autocache.sizes import (
    record_bytes,
    slots_within,
)

__all__ = [
    "ActivationCache",
    "CacheCounters",
    "CacheFile",
    "CacheFolder",
    "Ragged",
    "RaggedRows",
    "Records",
    "cache_files",
    "cacheable",
    "damaged_records",
    "fingerprint_chain",
    "hash_ragged_rows",
    "hash_rows",
    "record_bytes",
    "slots_within",
    "valid_part",
    "values_context",
]
