"""What this room uses of the C++ extension."""

from pipetransformer import _C

ActivationStore = _C.ActivationStore
hash_bytes = _C.hash_bytes
hash_rows = _C.hash_rows
hash_tensor = _C.hash_tensor
record_bytes = _C.record_bytes
slots_within = _C.slots_within

__all__ = [
    "ActivationStore",
    "hash_bytes",
    "hash_rows",
    "hash_tensor",
    "record_bytes",
    "slots_within",
]
