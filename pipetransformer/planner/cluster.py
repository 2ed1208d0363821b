"""The machines a plan is made for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pipetransformer.core import wire

# Before they are measured: medians of four processes on two cores. A round of a ring
# waits for a process that has to be woken.
HOST_LINK_BYTES_PER_S = 1_000_000_000
HOST_ROUND_NS = 1_000_000
HOST_STEP_NS = 500_000
# Between nodes of accelerators: of the paper's machines, and never learned, since the
# host's clock does not see when a reduction on a device has ended.
NETWORK_BYTES_PER_S = 5_000_000_000

_CACHE_FIELDS = ("host_bytes", "host_bytes_per_s", "disk_bytes", "disk_bytes_per_s")
_UNUSUAL = {"host_record_ns": 0, "host_in_line": False}  # left out of the text
_RARE = {  # likewise
    "cores_permille": 0,
    "replica_link_bytes_per_s": None,
    "replica_link_latency_ns": 0,
    "step_ns": 0,
    "row_ns": 0,
}


@dataclass(frozen=True, kw_only=True)
class CacheTiers:
    """Sizes and rates of the activation cache's tiers on one node.

    Args:
        host_bytes: host memory given to the cache, bytes.
        host_bytes_per_s: rate of reads from it.
        disk_bytes: disk space given to the cache, bytes.
        disk_bytes_per_s: rate of reads from it.
        host_record_ns: of each record read from host memory, whatever its size; with
            a rate only.
        host_in_line: each replica reads its rows of host memory before its first
            forward; else the reads of a node run alongside the step.

    Raises:
        ValueError: a field is of another kind, or negative.
    """

    host_bytes: int = 0
    host_bytes_per_s: int = 0
    disk_bytes: int = 0
    disk_bytes_per_s: int = 0
    host_record_ns: int = 0
    host_in_line: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        for field in (*_CACHE_FIELDS, "host_record_ns"):
            wire.check_int(getattr(self, field), f"cluster cache {field}")
        wire.check_bool(self.host_in_line, "cluster cache host_in_line")

    def to_dict(self) -> dict[str, object]:
        """Return the tiers as JSON-ready values."""
        fields = asdict(self)
        for name, usual in _UNUSUAL.items():
            if fields[name] == usual:
                del fields[name]
        return fields


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, devices, memory and links.

    Args:
        num_nodes: nodes of the job.
        devices_per_node: devices (CPU: slots) per node.
        device_memory_bytes: what a stage may use on one device; on CPU an
            accounting limit.
        device_link_bytes_per_s: between devices of a node; None: copies are free,
            as between CPU slots.
        device_link_latency_ns: per copy, and per message of a ring, likewise.
        network_bytes_per_s: between nodes; None: free.
        network_latency_ns: per message, of which a ring of n nodes sends 2 (n - 1) in
            turn.
        optimizer_bytes_per_parameter_byte: optimizer state alone (Adam 2.0); one
            gradient byte per parameter byte is added for active layers. None: what the
            profile says, and 2.0 for layers of which it says nothing.
        context_bytes: taken on every device by its processes.
        cores_permille: how many of a node's devices work at full speed at the same
            time, in thousandths, from 1000; when more work, all slow down alike, as
            slots of a host that share cores. 0: all of them.
        replica_link_bytes_per_s: between replicas of a node whose processes add up
            gradients themselves, through the host; None: they take the devices' link.
        replica_link_latency_ns: of each of the 2 (R - 1) rounds of a ring, with
            `replica_link_bytes_per_s` only.
        step_ns: what the process of each replica does for a step besides what layers
            and optimizer compute.
        row_ns: the same for each of its rows, as loading them.
        cache: tiers of the activation cache; None: those that a search is allowed
            are without limits.

    Raises:
        ValueError: a field is malformed; the text names it.
    """

    num_nodes: int = 1
    devices_per_node: int
    device_memory_bytes: int
    device_link_bytes_per_s: int | None = None
    device_link_latency_ns: int = 0
    network_bytes_per_s: int | None = None
    network_latency_ns: int = 0
    optimizer_bytes_per_parameter_byte: float | None = None
    context_bytes: int = 0
    cores_permille: int = 0
    replica_link_bytes_per_s: int | None = None
    replica_link_latency_ns: int = 0
    step_ns: int = 0
    row_ns: int = 0
    cache: CacheTiers | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        for field in ("num_nodes", "devices_per_node", "device_memory_bytes"):
            wire.check_int(getattr(self, field), f"cluster {field}", low=1)
        for field in (
            "device_link_bytes_per_s",
            "network_bytes_per_s",
            "replica_link_bytes_per_s",
        ):
            if getattr(self, field) is not None:
                wire.check_int(getattr(self, field), f"cluster {field}", low=1)
        for field in (
            "device_link_latency_ns",
            "network_latency_ns",
            "context_bytes",
            "replica_link_latency_ns",
            "step_ns",
            "row_ns",
        ):
            wire.check_int(getattr(self, field), f"cluster {field}")
        if self.cores_permille != 0:
            wire.check_int(self.cores_permille, "cluster cores_permille", low=1000)
        if self.optimizer_bytes_per_parameter_byte is not None:
            factor = wire.check_float(
                self.optimizer_bytes_per_parameter_byte,
                "cluster optimizer_bytes_per_parameter_byte",
            )
            object.__setattr__(self, "optimizer_bytes_per_parameter_byte", factor)
        if self.cache is not None and not isinstance(self.cache, CacheTiers):
            raise ValueError(
                f"cluster cache: expected CacheTiers, got {wire.shown(self.cache)}"
            )

    @property
    def hash(self) -> int:
        """64-bit hash of the content."""
        return wire.content_hash(self.to_dict())

    def to_dict(self) -> dict[str, object]:
        """Return the cluster as JSON-ready values."""
        fields: dict[str, object] = {"version": 1, **asdict(self)}
        if self.cache is None:
            del fields["cache"]
        else:
            fields["cache"] = self.cache.to_dict()
        for name, usual in _RARE.items():
            if fields[name] == usual:
                del fields[name]
        return fields

    def to_json(self) -> str:
        """Return canonical JSON text, equal for equal clusters."""
        return wire.canonical(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Read a cluster.

        Args:
            text: JSON in the format of :meth:`to_json`.

        Returns:
            The cluster.

        Raises:
            ValueError: malformed text, a missing, unknown or wrong field (named).
        """
        fields = wire.read_object(
            wire.parse(text, "cluster"),
            "cluster",
            required=(
                "num_nodes",
                "devices_per_node",
                "device_memory_bytes",
                "device_link_bytes_per_s",
                "device_link_latency_ns",
                "network_bytes_per_s",
                "network_latency_ns",
                "optimizer_bytes_per_parameter_byte",
            ),
            optional=("context_bytes", "cache", *_RARE),
            version=1,
        )
        if fields.get("cache") is not None:
            tiers = wire.read_object(
                fields["cache"],
                "cluster cache",
                required=_CACHE_FIELDS,
                optional=tuple(_UNUSUAL),
            )
            fields["cache"] = CacheTiers(**tiers)  # type: ignore[arg-type]
        return cls(**fields)  # type: ignore[arg-type]  # checked by __post_init__
