"""Types of the C++ extension; checked by stubtest."""

# core
def hash_bytes(data: bytes, seed: int = ...) -> int: ...

# planner

# autofreeze

# pipe

# autodp

# autocache
