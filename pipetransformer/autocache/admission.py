"""Whether frozen activations are worth keeping: a decision by cost. Pure.

All costs are of one sample on one replica, in ns, until the end of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

MARGIN = 1.1
"""Caching is given up only where it costs that many times as much as running the frozen
layers, and taken up again only where it costs that many times less: measurements are
no better, and a decision must not go to and fro."""

_NANOSECONDS = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierRates:
    """What it takes to read and to write a record.

    Attributes:
        bytes_per_s: Rate of reads, at least 1.
        record_ns: Of each read, whatever its size.
        write_bytes_per_s: Rate of writes, at least 1.
        write_record_ns: Of each write, whatever its size.
        overlap: Share of a read that can run alongside the step, 0 to 1: 0 for reads
            that the step waits for, 1 for those that are made ahead.

    Raises:
        ValueError: a number is out of range.
    """

    bytes_per_s: int
    record_ns: int
    write_bytes_per_s: int
    write_record_ns: int
    overlap: float = 0.0

    def __post_init__(self) -> None:
        """Check every number."""
        for name, low in (
            ("bytes_per_s", 1),
            ("record_ns", 0),
            ("write_bytes_per_s", 1),
            ("write_record_ns", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ValueError(f"{name}: expected an int >= {low}, got {value!r}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap: expected 0 to 1, got {self.overlap!r}")

    def read_ns(self, size: int) -> float:
        """Return the time of one read of that many bytes."""
        return self.record_ns + size * _NANOSECONDS / self.bytes_per_s

    def write_ns(self, size: int) -> float:
        """Return the time of one write of that many bytes."""
        return self.write_record_ns + size * _NANOSECONDS / self.write_bytes_per_s

    def slowed(self, *, reads: float, writes: float) -> TierRates:
        """Return the rates where everything takes so many times as long."""
        return dataclasses.replace(
            self,
            bytes_per_s=max(1, round(self.bytes_per_s / reads)),
            record_ns=round(self.record_ns * reads),
            write_bytes_per_s=max(1, round(self.write_bytes_per_s / writes)),
            write_record_ns=round(self.write_record_ns * writes),
        )


@dataclasses.dataclass(frozen=True)
class CacheRates:
    """What was measured of the cache before a run.

    Attributes:
        host: Of records in host memory; None: not measured, or it failed.
        disk: Of those on disk, likewise; None also where there is no disk.
        device: Of copies on a device, likewise; None also where there are none.
    """

    host: TierRates | None = None
    disk: TierRates | None = None
    device: TierRates | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> CacheRates:
        """Read what `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        tiers = (value[name] for name in ("host", "disk", "device"))
        return cls(*(None if each is None else TierRates(**each) for each in tiers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prospect:
    """What the cache can save at a boundary.

    Attributes:
        boundary: Number of frozen layers, at least 1.
        prefix_ns: To run them for a sample.
        record_bytes: Of a sample's record.
        held: Samples that the cache has room for, of `samples`.
        samples: All of them, at least 1.
        passes: That still come, at least 1, with the one that begins.
        keeps: Records are of use after the last pass, too.
        stored_ns: To run the layers behind those whose records are there already, 0 if
            these are of this boundary; None: there are none.
        active_ns: Of the rest of a step, alongside which reads can run.
        sharers: Replicas that read and write at these rates together, at least 1.
        copy_ns: Of each read what the step waits for in any case, as for the copy of
            what came from a disk.
        copied: Of the samples that the cache has room for, those that there will be
            copies of on devices; each is read once before.
        copied_ns: To read such a copy.
    """

    boundary: int
    prefix_ns: float
    record_bytes: int
    held: int
    samples: int
    passes: int
    keeps: bool = False
    stored_ns: float | None = None
    active_ns: float = 0.0
    sharers: int = 1
    copy_ns: float = 0.0
    copied: int = 0
    copied_ns: float = 0.0

    @property
    def share(self) -> float:
        """Part of the samples that the cache has room for."""
        return min(self.held, self.samples) / self.samples

    @property
    def num_reads(self) -> int:
        """Passes in which a held sample is found."""
        return self.passes - (self.stored_ns is None)

    @property
    def copied_share(self) -> float:
        """Part of the samples that are held which there will be copies of."""
        return min(self.copied, self.held) / max(self.held, 1)

    @property
    def num_copied(self) -> float:
        """Passes in which a held sample is read from a copy, a mean over these."""
        first = 1 + bool(self.stored_ns)  # which is read before it advances
        return max(0, self.num_reads - first) * self.copied_share

    @property
    def recompute_ns(self) -> float:
        """Cost without a cache."""
        return self.passes * self.prefix_ns

    def writes(self) -> bool:
        """Tell whether the pass that begins writes: something reads it later."""
        return self.stored_ns != 0 and (self.passes > 1 or self.keeps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """A decision on a tier, with its numbers.

    Attributes:
        boundary: Number of frozen layers that it is about.
        caches: Their outputs are kept and read; False: they run for every batch.
        read_ns: What a step waits for a sample that is read.
        prefix_ns: What the frozen layers take for a sample.
        record_bytes: Of a sample's record.
        held: Samples that the cache has room for, of `samples`.
        samples: All of them.
        gain_ns: What caching saves of a sample until the end of the run, a mean over
            all samples with its writes; below 0: what it costs.
        rates: That the decision is based on.
        turns_at_bytes_per_s: Rate of reads at which it would be another one; None: at
            no rate.
        pays_from: Number of frozen layers from which caching pays; None: for none.
        tier: ``"host"``, or ``"disk"``: what host memory has no room for.
        disk: Of the host's: the decision on the disk; None: there is none.
        copied: Of the samples held, those that there will be copies of on devices.
        copied_ns: What a step waits for a sample that is read from a copy.
    """

    boundary: int
    caches: bool
    read_ns: float
    prefix_ns: float
    record_bytes: int
    held: int
    samples: int
    gain_ns: float
    rates: TierRates
    turns_at_bytes_per_s: int | None
    pays_from: int | None = None
    tier: str = "host"
    disk: Admission | None = None
    copied: int = 0
    copied_ns: float = 0.0

    @property
    def uses_disk(self) -> bool:
        """Whether records on disk are read and written."""
        return self.caches and self.disk is not None and self.disk.caches

    @property
    def used_samples(self) -> int:
        """Samples whose records are kept, wherever."""
        on_disk = self.disk.held if self.disk is not None and self.uses_disk else 0
        return self.held + on_disk if self.caches else 0

    @property
    def usual_rates(self) -> tuple[int, int]:
        """Bytes a second and ns a record of reads once there are copies, a mean."""
        copied = self.copied / max(self.held, 1)
        record = (1 - copied) * self.rates.record_ns + copied * self.copied_ns
        rate = self.rates.bytes_per_s / max(1 - copied, 1e-9)
        return min(round(rate), 2**62), round(record)

    @property
    def text(self) -> str:
        """The decision as one line for people."""
        text = f"cache: {self._told}, {self._pays}"
        if self.caches and self.disk is not None:
            text += f"; on disk: {self.disk._told}"
        return text

    @property
    def _told(self) -> str:
        part = ""
        if self.held < self.samples:
            part = f" for {self.held} of {self.samples} samples"
        verdict = f"cached{part}" if self.caches else "recomputed"
        turns = "no rate would turn it"
        if self.turns_at_bytes_per_s is not None:
            side = "below" if self.caches else "above"
            turns = f"would turn {side} {_rate(self.turns_at_bytes_per_s)}"
        copies = ""
        if self.copied:
            copies = f" ({_time(self.copied_ns)} for {self.copied} on devices)"
        against = f"a sample against {_time(self.prefix_ns)} recomputed"
        return (
            f"read {_time(self.read_ns)}{copies} {against} "
            f"({self.tier} {_rate(self.rates.bytes_per_s)} measured): "
            f"{verdict}; {turns}"
        )

    @property
    def _pays(self) -> str:
        if self.pays_from is None:
            return "pays for no number of frozen layers"
        layers = "layer" if self.pays_from == 1 else "layers"
        return f"pays from {self.pays_from} frozen {layers} on"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Admission:
        """Read what `to_dict` gave."""
        rates, disk = TierRates(**value["rates"]), value.get("disk")
        below = None if disk is None else cls.from_dict(disk)
        return cls(**{**value, "rates": rates, "disk": below})


def _read_ns(rates: TierRates, prospect: Prospect) -> float:
    """Return by how much reading a record lengthens the step.

    A step with reads takes the longer of the reads alone, and of everything else with
    the part of the reads that it waits for.
    """
    read = prospect.sharers * rates.read_ns(prospect.record_bytes)
    exposed = max(read - prospect.active_ns, (1 - rates.overlap) * read)
    return exposed + prospect.copy_ns


def cached_ns(rates: TierRates, prospect: Prospect) -> float:
    """Return what caching costs per sample until the end, a mean over all samples.

    The first pass runs what is not there, and writes. Whatever is not found was looked
    for in vain.
    """
    size, missed = prospect.record_bytes, prospect.prefix_ns + rates.record_ns
    held = (prospect.num_reads - prospect.num_copied) * _read_ns(rates, prospect)
    held += prospect.num_copied * prospect.copied_ns
    held += missed if prospect.stored_ns is None else prospect.stored_ns
    held += prospect.sharers * rates.write_ns(size) if prospect.writes() else 0.0
    others = prospect.passes * missed
    return prospect.share * held + (1 - prospect.share) * others


def decide(
    rates: TierRates,
    prospect: Prospect,
    *,
    caches_now: bool | None = None,
    tier: str = "host",
) -> Admission:
    """Compare keeping the frozen layers' outputs with running them for every batch.

    Args:
        rates: Of the tier that would hold them.
        prospect: What there is to save.
        caches_now: What is done now at this boundary; None: nothing yet. A decision
            changes only where the other way is `MARGIN` times as good.
        tier: Its name.

    Returns:
        The decision; `Admission.pays_from` is left to the caller, who knows the other
        boundaries.
    """
    cached, recomputed = cached_ns(rates, prospect), prospect.recompute_ns
    caches = prospect.held > 0 and cached <= _limit(prospect, caches_now is not False)
    return Admission(
        boundary=prospect.boundary,
        caches=caches,
        read_ns=_read_ns(rates, prospect),
        prefix_ns=prospect.prefix_ns,
        record_bytes=prospect.record_bytes,
        held=min(prospect.held, prospect.samples),
        samples=prospect.samples,
        gain_ns=recomputed - cached,
        rates=rates,
        turns_at_bytes_per_s=_turning_rate(rates, prospect, caches),
        tier=tier,
        copied=min(prospect.copied, prospect.held, prospect.samples),
        copied_ns=prospect.copied_ns,
    )


def on_disk(
    prospect: Prospect, host: TierRates, *, held: int, disk_bytes: int, sharers: int
) -> Prospect:
    """Return what a disk can save where host memory has no room.

    Reads of a disk are made ahead, while other samples are computed and read, too; what
    came from it is copied in line, as from host memory.

    Args:
        prospect: Of the host.
        host: Its rates.
        held: Samples that the disk has room for.
        disk_bytes: Of a record there.
        sharers: Replicas of a node.
    """
    held = max(0, min(held, prospect.samples - prospect.held))
    share = max(held, 1) / prospect.samples
    return dataclasses.replace(
        prospect,
        held=held,
        record_bytes=disk_bytes,
        active_ns=prospect.active_ns / share,
        sharers=sharers,
        copied=max(0, prospect.copied - prospect.held),
        copy_ns=host.read_ns(prospect.record_bytes),
    )


def _limit(prospect: Prospect, caches: bool) -> float:
    """Return what caching may cost, whether it is done now or not.

    The margin is that of the samples that there is room for: the others change nothing.
    """
    at_stake = prospect.share * prospect.recompute_ns
    allowed = at_stake * MARGIN if caches else at_stake / MARGIN
    return prospect.recompute_ns - at_stake + allowed


def _turning_rate(rates: TierRates, prospect: Prospect, caches: bool) -> int | None:
    """Return the rate of reads at which a decision turns, once it is in force."""
    limit = _limit(prospect, caches)
    free = dataclasses.replace(rates, record_ns=0, bytes_per_s=2**62)
    # What does not depend on the rate: all but the reads' bytes.
    fixed = cached_ns(free, prospect)
    looked_up = prospect.passes * (1 - prospect.share)
    looked_up += prospect.share * (prospect.stored_ns is None)
    fixed += looked_up * rates.record_ns
    reads = prospect.share * (prospect.num_reads - prospect.num_copied)
    if reads <= 0 or prospect.record_bytes <= 0 or limit <= fixed:
        return None
    exposed = (limit - fixed) / reads
    read = exposed + prospect.active_ns
    if rates.overlap < 1:
        read = min(read, exposed / (1 - rates.overlap))
    read /= prospect.sharers
    if read <= rates.record_ns:
        return None
    rate = prospect.record_bytes * _NANOSECONDS / (read - rates.record_ns)
    return max(1, round(rate))


def _time(ns: float) -> str:
    return f"{ns / 1e3:.1f} us" if ns < 1e5 else f"{ns / 1e6:.2f} ms"


def _rate(bytes_per_s: int) -> str:
    return f"{bytes_per_s / 1e9:.{1 if bytes_per_s >= 1e9 else 3}f} GB/s"
