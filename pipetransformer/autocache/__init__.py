"""Activations of the frozen prefix: computed once per sample, then read back."""

from pipetransformer.autocache.admission import (
    Admission,
    CacheRates,
    Prospect,
    TierRates,
    decide,
    on_disk,
)
from pipetransformer.autocache.cache import (
    ActivationCache,
    CacheCounters,
    DiskTraffic,
    hash_ragged_rows,
    hash_rows,
)
from pipetransformer.autocache.codec import (
    TOLERANCES,
    Codec,
    round_trip,
    usual_bytes,
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
    prefix_content,
    values_context,
)
from pipetransformer.autocache.ragged import Ragged, RaggedRows, valid_part
from pipetransformer.autocache.rates import (
    measure_device_rates,
    measure_disk_rates,
    measure_rates,
)
from pipetransformer.autocache.records import Records, unfit
from pipetransformer.autocache.sizes import (
    bytes_on_disk,
    least_budget,
    record_bytes,
    slots_within,
)

__all__ = [
    "TOLERANCES",
    "ActivationCache",
    "Admission",
    "CacheCounters",
    "CacheFile",
    "CacheFolder",
    "CacheRates",
    "Codec",
    "DiskTraffic",
    "Prospect",
    "Ragged",
    "RaggedRows",
    "Records",
    "TierRates",
    "bytes_on_disk",
    "cache_files",
    "cacheable",
    "damaged_records",
    "decide",
    "fingerprint_chain",
    "hash_ragged_rows",
    "hash_rows",
    "least_budget",
    "measure_device_rates",
    "measure_disk_rates",
    "measure_rates",
    "on_disk",
    "prefix_content",
    "record_bytes",
    "round_trip",
    "slots_within",
    "unfit",
    "usual_bytes",
    "valid_part",
    "values_context",
]
