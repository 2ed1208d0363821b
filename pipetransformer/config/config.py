"""Configuration: frozen dataclasses, one per room; every field has a default."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, get_args

from pipetransformer.autodp import AutoDPConfig
from pipetransformer.config.checks import settle_kinds
from pipetransformer.config.mapping import from_mapping, to_mapping

CheckpointMode = Literal["always", "except_last", "never"]
ReshapeMode = Literal["priced", "always", "never"]
AmpMode = Literal["bf16", "fp16"]
Verify = Literal["sampled", "all"]
Codec = Literal["native", "bf16", "fp16", "int8"]
SchedulerInterval = Literal["step", "epoch"]
Prefix = Literal["auto", "replicated", "pipelined", "filled"]
Replicas = Literal["auto", "all"]
Schedule = Literal["gpipe", "1f1b", "zb-h1", "auto"]


def _require(ok: bool, what: str, expected: str, actual: object) -> None:
    if not ok:
        raise ValueError(f"{what}: expected {expected}, got {actual!r}")


def _positive_or_none(what: str, value: int | float | None) -> None:
    _require(value is None or value > 0, what, "a positive number or None", value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Limits and preferences for the planner.

    Attributes:
        slot_memory_bytes: Memory of one device in bytes. On CPU it is an accounting
            limit of the planner, not a physical one. None: what the job
            may use of the host's memory (limits of its cgroups count), divided by the
            slots, or what an accelerator has, divided by the slots that it serves.
        num_stages: Forces the pipeline length K; None lets the planner choose.
        num_microbatches: Forces M; None lets the planner choose, which takes 1 where
            layers are right for whole batches alone.
        max_replicas: Upper bound of R, per run; 1 switches AutoDP off.
        replicas: "auto": as many as take the shortest step, of those that fit and
            halves of them, so devices may stay idle; "all": as many as the devices
            have room for beside K, as in the paper, of those for which a batch has
            rows enough.
        cuts: Forces the cuts: K+1 layer indices from the boundary to L. Only for runs
            that do not freeze.
        reshape: When K, R, M or cuts change beyond what a new boundary asks for:
            "priced": when the gain until the next freeze exceeds the pause; "always":
            whenever a step gets 2 % shorter; "never": only when the plan in force
            cannot go on.
        hysteresis: With "priced": share by which a gain must exceed its price.
        optimizer_bytes_per_parameter_byte: Optimizer state per parameter byte: 2 for
            Adam and AdamW in fp32, 1 for SGD with momentum, 0 without. None: what a
            step of a copy of the optimizer leaves, measured before the first plan; 2
            where none steps, as of an optimizer that is not torch's own.
        microbatch_samples: Micro-batch sizes, in samples, that are profiled. Where one
            alone is left of them by the batch and M is not given, a quarter of it is
            profiled as well: else the smallest micro-batches would look next to free.
        profile: Where what is measured before the first plan is kept, on the lead: a
            folder, with a file for each model, kind of inputs, device and number of
            threads, or one file, ``*.json``, which must be of this run. What is found
            there is not measured again. None: each run measures.
        prefix: Where frozen layers run as long as their outputs are not cached:
            "replicated": each device has all of them, for a part of the rows;
            "pipelined": each has a chunk, which all micro-batches pass, so that they
            take a device's memory once; on accelerators alone, since slots of a host
            have the layers in common. "filled": each has all of them, and runs those of
            the next batch, which is loaded one step early, while it waits for other
            stages; on slots of a host alone, and with one stage as "replicated".
            "auto": the planner's choice.
        trial_steps: Tries out what the planner can't tell apart: the plans whose
            simulated steps are within 10 % of the shortest, at most four, each for so
            many optimizer steps of the training and one more, at the start, for a
            quarter of the run at most. The one whose steps took the shortest stays;
            what was found counts, by shape, in later plans. 0: none is tried out.
    """

    slot_memory_bytes: int | None = None
    num_stages: int | None = None
    num_microbatches: int | None = None
    max_replicas: int | None = None
    replicas: Replicas = "auto"
    cuts: Sequence[int] | None = None
    reshape: ReshapeMode = "priced"
    hysteresis: float = 0.25
    optimizer_bytes_per_parameter_byte: float | None = None
    microbatch_samples: Sequence[int] = (1, 4, 16)
    profile: str | os.PathLike[str] | None = None
    prefix: Prefix = "auto"
    trial_steps: int = 0

    def __post_init__(self) -> None:
        """Validate each field."""
        settle_kinds(self)
        _require(
            self.trial_steps >= 0,
            "PlanConfig.trial_steps",
            "a number of steps from 0",
            self.trial_steps,
        )
        _require(
            not self.trial_steps or self.reshape != "never",
            "PlanConfig.trial_steps",
            "0 with reshape='never'",
            self.trial_steps,
        )
        for name in (
            "slot_memory_bytes",
            "num_stages",
            "num_microbatches",
            "max_replicas",
        ):
            _positive_or_none(f"PlanConfig.{name}", getattr(self, name))
        _require(
            self.reshape in ("priced", "always", "never"),
            "PlanConfig.reshape",
            "'priced', 'always' or 'never'",
            self.reshape,
        )
        _require(
            0 <= self.hysteresis <= 1000,  # nan compares false
            "PlanConfig.hysteresis",
            "a number from 0 to 1000",
            self.hysteresis,
        )
        usable = self.profile is None or os.fspath(self.profile) != ""
        _require(
            usable, "PlanConfig.profile", "a file's or folder's name", self.profile
        )
        _require(
            self.prefix in get_args(Prefix),
            "PlanConfig.prefix",
            "'auto', 'replicated', 'pipelined' or 'filled'",
            self.prefix,
        )
        _require(
            self.replicas in get_args(Replicas),
            "PlanConfig.replicas",
            "'auto' or 'all'",
            self.replicas,
        )
        ratio = self.optimizer_bytes_per_parameter_byte
        _require(
            ratio is None or 0 <= ratio <= 64,
            "PlanConfig.optimizer_bytes_per_parameter_byte",
            "a number from 0 to 64",
            ratio,
        )
        sizes = list(self.microbatch_samples)
        _require(
            bool(sizes) and sizes == sorted(set(sizes)) and sizes[0] >= 1,
            "PlanConfig.microbatch_samples",
            "increasing positive sizes",
            sizes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeConfig:
    """How the pipeline runs.

    Attributes:
        checkpoint: Activation recomputation: "never", "except_last" or "always".
        threads_per_stage: Intra-op threads of each CPU slot; None: the cores that the
            job's cgroups allow, divided by the node's slots, at least 1, and no more
            than the process's affinity has, or ``OMP_NUM_THREADS`` or
            ``torch.set_num_threads`` say (but for the 1 that torchrun sets itself).
        num_slots: CPU slots of a process that was started alone; under a launcher
            there is one slot per process. Accelerators count by `Config.devices`.
        schedule: The order of a step's cells: "gpipe" (all forwards first, then the
            loss of the whole batch), or "1f1b" or "zb-h1", which run the backward of a
            micro-batch as soon as they can: activations of fewer micro-batches are
            kept, so that a shorter pipeline may fit, and in "zb-h1" stages wait less.
            The loss is then called for each micro-batch; it is to be a mean over
            rows, or over what ``loss_weight`` counts. "auto": the planner's choice.
            A loop of your own, with ``engine.model``, runs GPipe under any plan.
        keep_freed_memory: On the host: let the C library (glibc) keep what a step
            frees for the next one, until K or R changes or the engine is left, instead
            of giving it to the system and taking it anew. The process then holds the
            most that it needed. Settings of the environment (``MALLOC_*_``,
            ``GLIBC_TUNABLES``) go before it.
    """

    checkpoint: CheckpointMode = "never"
    threads_per_stage: int | None = None
    num_slots: int = 1
    schedule: Schedule = "gpipe"
    keep_freed_memory: bool = True

    def __post_init__(self) -> None:
        """Validate each field."""
        settle_kinds(self)
        _require(
            self.checkpoint in ("always", "except_last", "never"),
            "PipeConfig.checkpoint",
            "'always', 'except_last' or 'never'",
            self.checkpoint,
        )
        _require(
            self.schedule in get_args(Schedule),
            "PipeConfig.schedule",
            "'gpipe', '1f1b', 'zb-h1' or 'auto'",
            self.schedule,
        )
        _positive_or_none("PipeConfig.threads_per_stage", self.threads_per_stage)
        _require(
            self.num_slots >= 1, "PipeConfig.num_slots", ">= 1 slot", self.num_slots
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The activation cache.

    Attributes:
        enabled: Off: the frozen prefix is recomputed for every batch.
        budget_bytes: Bytes of the host slab per node and id space. None: a quarter of
            the memory that the job may still take.
        verify: Compare the checksum of one read in 64 (``"sampled"``) or of all.
        audit_every: One hit in that many is computed again and compared; a difference
            beyond rounding ends the cache's use and training goes on without. Before
            the first record of a boundary is stored, a row of its batch runs alone,
            too, and where that differs nothing is kept. 0: none of both.
        codec: What records of the training set are kept in: as they are (``"native"``),
            or rounded to ``"bf16"``, ``"fp16"`` or ``"int8"``, if gradients on the
            first samples show that it makes no difference. See docs/cache.md.
        directory: Where records are kept for later runs, which start with those of
            the same layers, weights and inputs; made when the run opens. None: they
            go with the run.
        views: Random augmentation of a training sample is drawn from the seed, the
            sample and ``epoch % views``, in this process as in loader processes: so
            many versions of each sample come again and again, and are cached. They take
            so many times the memory, and the first so many epochs compute them. 1: the
            augmentation of the first epoch, for good. None: each epoch draws anew, and
            what is augmented is not cached.
        debug: For finding faults in layers: every hit is computed again and compared,
            every checksum is, too, and a difference is an error that names the sample
            and, where it can be told, the layer. Saves no time.
        admission: ``"measured"``: frozen layers run for every batch where that costs
            less than reading their activations, by what both take here. ``"always"``:
            the cache is used whatever it costs; nothing is measured, and plans count
            reads as free.
        disk_directory: Where a node keeps what its slab has no room for, in a file
            without a name that goes with the run. A fast disk of the node itself.
            None: what has no room is recomputed.
        disk_bytes: Bytes of that file per id space. None: half of what is free there.
        device_bytes: Memory on the first device of each pipeline for copies of records
            of the training set, made as they are read, so that most reads need neither
            the host's memory nor the link to the device. No more than what a plan
            leaves free of that slot. A replica then trains on much the same samples in
            each pass: the rows of a batch are in another order, and the batches are
            what they were. None, or slots of the host: no copies.
    """

    enabled: bool = True
    budget_bytes: int | None = None
    verify: Verify = "sampled"
    audit_every: int = 1000
    codec: Codec = "native"
    directory: str | os.PathLike[str] | None = None
    views: int | None = None
    debug: bool = False
    admission: Literal["measured", "always"] = "measured"
    disk_directory: str | os.PathLike[str] | None = None
    disk_bytes: int | None = None
    device_bytes: int | None = None

    def __post_init__(self) -> None:
        """Validate each field."""
        settle_kinds(self)
        _positive_or_none("CacheConfig.budget_bytes", self.budget_bytes)
        _positive_or_none("CacheConfig.views", self.views)
        _positive_or_none("CacheConfig.disk_bytes", self.disk_bytes)
        _positive_or_none("CacheConfig.device_bytes", self.device_bytes)
        _require(
            self.verify in ("sampled", "all"),
            "CacheConfig.verify",
            "'sampled' or 'all'",
            self.verify,
        )
        _require(
            self.audit_every >= 0,
            "CacheConfig.audit_every",
            ">= 0 hits",
            self.audit_every,
        )
        _require(
            self.codec in get_args(Codec),
            "CacheConfig.codec",
            "'native', 'bf16', 'fp16' or 'int8'",
            self.codec,
        )
        for name in ("directory", "disk_directory"):
            folder = getattr(self, name)
            usable = folder is None or os.fspath(folder) != ""
            _require(usable, f"CacheConfig.{name}", "a folder's name or None", folder)
        _require(
            self.admission in ("measured", "always"),
            "CacheConfig.admission",
            "'measured' or 'always'",
            self.admission,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Automatic checkpoints.

    Attributes:
        directory: Where checkpoints go, made when the run opens; None switches them
            off.
        every_epochs: A checkpoint after every that many epochs, and one of the last
            step when the run ends well.
        every_steps: Also one after every that many optimizer steps; None: none. One
            that falls on the last batch of a pass is written when the epoch ends.
        keep: The newest that many are kept. One is deleted only when so many newer
            ones have been read and found whole.
        resume: Load the newest valid checkpoint of `directory` at the start.
        max_failures: An automatic checkpoint that cannot be written is a warning, and
            the next one is tried when it is due; that many in a row end the run.
    """

    directory: str | os.PathLike[str] | None = None
    every_epochs: int = 1
    every_steps: int | None = None
    keep: int = 2
    resume: bool = False
    max_failures: int = 3

    def __post_init__(self) -> None:
        """Validate each field."""
        settle_kinds(self)
        what, folder = "CheckpointConfig", self.directory
        usable = folder is None or os.fspath(folder) != ""
        _require(usable, f"{what}.directory", "a folder's name or None", folder)
        _require(
            self.every_epochs >= 1, f"{what}.every_epochs", ">= 1", self.every_epochs
        )
        _positive_or_none(f"{what}.every_steps", self.every_steps)
        _require(self.keep >= 1, f"{what}.keep", ">= 1", self.keep)
        most = self.max_failures
        _require(most >= 1, f"{what}.max_failures", ">= 1", most)
        _require(
            folder is not None or not (self.resume or self.every_steps),
            f"{what}.directory",
            "a folder when resume or every_steps is set",
            folder,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything but the model, the optimizer, the loss and the freeze policy.

    Attributes:
        seed: Seeds the sampler and every random draw inside the model, which draws
            nothing from the global random generators.
        eval_microbatch_rows: Most rows of an evaluation micro-batch. A set is cut
            evenly, whatever the plan: a row's bits may depend on the shape it is
            computed in.
        freeze_every: Optimizer steps between two evaluation points of the freeze
            policy; the plan may then change within a pass, too. What policies call
            epoch is the number of the point: entry T of a schedule holds from step
            T * `freeze_every` on. None: one point per epoch.
        prepare_steps: Batches for which training goes on under the old plan while the
            new one is prepared: groups connect and ranks agree meanwhile. Plans then
            change within passes only: so many batches after the decision, at the
            optimizer step that these end in, or at the pass's end. What is to be
            frozen trains for that much longer. 0: training stops while a plan is
            prepared.
        accumulation_steps: Batches for each optimizer step: `engine.step` adds up
            their gradients, which are reduced with the last one alone, as those of one
            large batch. A pass ends with a step, whatever is left. Take a step with
            every batch of a pass.
        amp: "bf16" or "fp16": forward and loss run under ``torch.autocast``, the
            weights stay as they are. With "fp16" the loss is scaled (``GradScaler``),
            and a step whose gradients overflow changes nothing but the scale. None:
            no mixed precision, or that of an autocast region around the calls.
        scheduler_interval: The learning-rate scheduler steps with every optimizer
            "step", or with every "epoch".
        clip_grad_norm: Clips the norm over all active parameters, after the
            all-reduce; None: no clipping.
        check_loss: Call the loss again at the first batch, with each row twice and
            with each half of the rows. With rows twice it is to be the same, else it
            is refused; where the mean of the halves is another one, a warning says
            that `loss_weight` is needed. False: for a loss that compares rows with
            each other, or must not be called again. Each replica then takes it over
            its own rows.
        devices: The devices of each node's slots, in order, as every process of the
            node sees them: ``("cuda:0", "cuda:1")``. A slot is there for every process
            that a launcher has started; fewer devices are dealt to the slots in turn,
            so that one may serve several stages. A process that was started alone has
            a slot for each entry. ``("cpu",)``: slots of the host, see `PipeConfig`.
            None: the CUDA devices that the process sees, or else the host. The layers
            are moved; the model that the engine is given is on the host before and
            after.
        report: A folder for ``report.html``, a page that shows the run and needs no
            network, and ``summary.json``: written by the lead at the end of each pass
            (of passes so short that writing would take more than a tenth of the time:
            of some) and of the run. None: neither.
        trace: A folder for ``trace-<rank>.json``, timelines for Perfetto of what each
            rank did, written at the run's end: the cells of its pipelines by stage,
            and the phases of its process. A resumed run keeps those that are there as
            ``trace-<rank>.1.json``. None: none.
        plan: See `PlanConfig`.
        pipe: See `PipeConfig`.
        cache: See `CacheConfig`.
        checkpoint: See `CheckpointConfig`.
        autodp: See `AutoDPConfig`.
    """

    seed: int = 0
    eval_microbatch_rows: int = 64
    freeze_every: int | None = None
    prepare_steps: int = 0
    accumulation_steps: int = 1
    amp: AmpMode | None = None
    scheduler_interval: SchedulerInterval = "step"
    clip_grad_norm: float | None = None
    check_loss: bool = True
    devices: Sequence[str] | None = None
    report: str | os.PathLike[str] | None = None
    trace: str | os.PathLike[str] | None = None
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    pipe: PipeConfig = dataclasses.field(default_factory=PipeConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    autodp: AutoDPConfig = dataclasses.field(default_factory=AutoDPConfig)

    def __post_init__(self) -> None:
        """Validate each field."""
        settle_kinds(self)
        _require(0 <= self.seed < 2**63, "Config.seed", "0 <= seed < 2**63", self.seed)
        rows = self.eval_microbatch_rows
        _require(rows >= 1, "Config.eval_microbatch_rows", ">= 1 row", rows)
        every = self.freeze_every
        _require(
            every is None or every >= 1,
            "Config.freeze_every",
            ">= 1 step or None",
            every,
        )
        ahead = self.prepare_steps
        _require(ahead >= 0, "Config.prepare_steps", "a number of steps from 0", ahead)
        _require(
            not (ahead and self.plan.trial_steps),
            "PlanConfig.trial_steps",
            "0 with prepare_steps",
            self.plan.trial_steps,
        )
        shared = self.accumulation_steps
        _require(shared >= 1, "Config.accumulation_steps", ">= 1 batch", shared)
        for name, known in (
            ("amp", ("bf16", "fp16", None)),
            ("scheduler_interval", ("step", "epoch")),
        ):
            value = getattr(self, name)
            _require(value in known, f"Config.{name}", f"one of {known}", value)
        _positive_or_none("Config.clip_grad_norm", self.clip_grad_norm)
        names = self.devices
        listed = names is None or (not isinstance(names, str) and len(names) > 0)
        _require(listed, "Config.devices", "a sequence of names or None", names)
        for name in ("report", "trace"):
            folder = getattr(self, name)
            usable = folder is None or os.fspath(folder) != ""
            _require(usable, f"Config.{name}", "a folder's name or None", folder)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON, YAML and TOML can hold, nested per room.

        Durations are seconds, tuples are lists. Fields that are None are left out: TOML
        has no such value. So is ``autodp.secret``, which belongs into no file that is
        not made for it.
        """
        return to_mapping(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Config:
        """Make a config from what `to_dict` gives, or from a part of it.

        ``Config.from_dict(config.to_dict()) == config``, but for the secret.

        Args:
            mapping: By the names of fields; those of the rooms are mappings again. What
                is left out has its default.

        Raises:
            TypeError: a value of a wrong kind; names the field, as in
                ``Config.plan.num_stages``.
            ValueError: an unknown name, a value out of range, or a secret.
        """
        return from_mapping(cls, mapping, cls.__name__)

    def facts(self) -> list[str]:
        """Return each field as a line of text; equal on two ranks iff they agree."""

        def plain(value: object) -> str:
            if isinstance(value, timedelta):
                return f"{value.total_seconds()} s"
            return repr(value)

        content = dataclasses.asdict(self)
        del content["autodp"]["interface"]  # hosts name their interfaces differently
        del content["autodp"]["secret"]  # travels nowhere; ranks meet only with it
        named: dict[str, object] = {}
        for room, value in content.items():
            inner = value if isinstance(value, dict) else {"": value}
            named |= {f"{room}.{name}".rstrip("."): v for name, v in inner.items()}
        return [
            f"Config.{name} = {json.dumps(value, sort_keys=True, default=plain)}"
            for name, value in named.items()
        ]
