"""One replica under one plan: frozen prefix, pipeline, DistributedDataParallel."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.autocache import ActivationCache
from pipetransformer.autodp import ActiveGroup
from pipetransformer.core.devices import to_device
from pipetransformer.data import Batch
from pipetransformer.data.structures import arguments_of, num_rows
from pipetransformer.device import bring, wait_for_queued
from pipetransformer.pipe import Pipe, PipeSequential, Workers
from pipetransformer.planner import Plan
from pipetransformer.replica.codec_gate import CodecGate
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.report.clock import Clock


class LastForward:
    """What a model was called with last; no attribute of a module, which cost more.

    Attributes:
        batch: None after bare inputs.
        rows: Of bare inputs, too.
    """

    __slots__ = ("batch", "rows")

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.rows = 0


class ActiveModel(nn.Module):
    """What DDP wraps: frozen prefix with cache, then the pipeline of active layers.

    The prefix is no child: DDP sees neither its parameters nor its buffers, and
    ``train()`` or ``eval()`` never reach it.

    Args:
        pipe: The pipeline of the active layers.
        prefix: The frozen layers, or None at boundary 0.
        cache: Gives the training slab, or None.
        position: Gives the draw position of the next forward, from the number of its
            batch in the pass.
        write: Tells whether prefix activations will be read again.
        gate: Decides on the codec of records.
        clock: Is told when inputs are loaded.
        upcoming: Gives the batch after the one that is run, where it is known.
        position_after: Gives the draw position of the forward after that of a batch.
        schedule: The order of cells in a step that has the loss.
    """

    def __init__(
        self,
        pipe: Pipe,
        prefix: FrozenPrefix | None,
        *,
        cache: Callable[[], ActivationCache | None],
        position: Callable[[int | None], DrawPosition],
        write: Callable[[], bool],
        gate: CodecGate,
        clock: Clock,
        upcoming: Callable[[], Batch | None] = lambda: None,
        position_after: Callable[[int], DrawPosition] | None = None,
        schedule: str = "gpipe",
    ) -> None:
        super().__init__()
        self.pipe = pipe
        self._schedule = schedule
        self._prefix = (prefix,)
        self._cache = cache
        self._position = position
        self._write = write
        self._gate = gate
        self._clock = clock
        self._upcoming = upcoming
        self._position_after = position_after
        self._retired = False
        self._forwards: dict[DrawPosition, int] = {}  # in the step, for gradients
        self.last = LastForward()

    def retire(self) -> None:
        """Make every later call fail: the plan of this model is no longer in force."""
        self._retired = True

    def forward(
        self,
        inputs: Any,
        targets: Any = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> Any:
        """Run a batch.

        Args:
            inputs: A `Batch` of ``engine.batches``, or bare inputs, whose prefix is
                recomputed because they carry no ids.
            targets: With `loss`: of the rows.
            loss: ``loss(outputs, targets)`` of a micro-batch, for a schedule that runs
                each backward as soon as it can.

        Returns:
            What the last layer returns; with `loss` the mean over rows. A batch
            without rows returns zero times the parameters, ``()``, so that the replica
            still takes part in the all-reduce; it is its own loss.

        Raises:
            RuntimeError: the plan has changed since this handle was taken.
        """
        if self._retired:
            raise RuntimeError(
                "engine.model: expected the model of the current plan, got a handle "
                "from before a transformation; read engine.model again"
            )
        batch = inputs if isinstance(inputs, Batch) else None
        rows = batch.rows if batch is not None else num_rows(inputs)
        self.last.batch, self.last.rows = batch, rows or 0
        if rows == 0:
            return self._nothing()
        position = self._position(batch.index if batch is not None else None)
        drawn, pipe = position.again(self._count(position)), self.pipe
        pipe.set_draw_position(step=drawn.step, first_microbatch=drawn.first_microbatch)
        prefix = self._prefix[0]
        if prefix is None:
            value = self._inputs(batch) if batch is not None else inputs
            value = bring(value, pipe.devices[0])
        elif batch is None:
            value = prefix(lambda: inputs, None, None, position=position)
        else:
            codec, compare = self._gate.terms(batch.targets)
            value = prefix(
                lambda: self._inputs(batch),
                batch.ids,
                self._cache(),
                position=position,
                keys=batch.input_keys,
                lazy=batch.lazy,
                view=batch.view,
                write=self._write(),
                codec=codec,
                compare=compare,
            )
        if prefix is not None and batch is not None:
            self._run_ahead(prefix, batch)
        arguments = arguments_of(value, first=prefix is None)
        named = dict(arguments) if isinstance(arguments, Mapping) else {}
        args = () if isinstance(arguments, Mapping) else arguments
        if loss is not None:
            return pipe.step(
                args, named, targets=targets, loss=loss, schedule=self._schedule
            )
        return pipe(*args, **named)

    def _count(self, position: DrawPosition) -> int:
        """Return how often a step has run a batch before, and count this time.

        Forwards without gradients, such as one that a script logs a loss of, change
        nothing for the others.
        """
        if not torch.is_grad_enabled():
            return 0
        if next(iter(self._forwards), position).step != position.step:
            self._forwards.clear()
        times = self._forwards.get(position, 0)
        self._forwards[position] = times + 1
        return times

    def _run_ahead(self, prefix: FrozenPrefix, batch: Batch) -> None:
        """Let the workers fill their gaps with the frozen layers of the next batch."""
        following = self._upcoming()
        if following is None or following.rows == 0 or self._position_after is None:
            return
        prefix.run_ahead(
            lambda: self._inputs(following),
            following.ids,
            self._cache(),
            position=self._position_after(batch.index),
        )

    def _inputs(self, batch: Batch) -> Any:
        with self._clock.phase("data"):
            return batch.inputs

    def _nothing(self) -> Tensor:
        used = [p for p in self.pipe.parameters() if p.requires_grad]
        sums = [p.reshape(-1)[:0].abs().sum() for p in used]  # abs: some are complex
        return torch.stack([to_device(each, sums[-1].device) for each in sums]).sum()


class LastGradient:
    """Notes when backward has accumulated the last gradient of a replica.

    Backward reaches the first trainable layer last; what it waits for after that is
    the other replicas and the rest of the all-reduce.

    Args:
        layers: The active layers in order.

    Attributes:
        at: A ``time.perf_counter()``; 0 as long as there was none.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.at = 0.0  # no layers: a replica that waits for no other
        trainable = ([p for p in x.parameters() if p.requires_grad] for x in layers)
        first = next((found for found in trainable if found), [])
        self._handles = []
        for parameter in first:
            handle = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _note(self, _: Tensor) -> None:
        self.at = time.perf_counter()

    def forget(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def wrap(model: ActiveModel, group: ActiveGroup) -> DistributedDataParallel:
    """Build DDP over the active group; values are equal already, so none are sent."""
    return DistributedDataParallel(
        model,
        process_group=group.process_group,
        init_sync=False,
        find_unused_parameters=False,
        gradient_as_bucket_view=True,
    )


def _require_trainable(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("trainable parameters: expected at least one, got none left")


def warm_up(group: ActiveGroup) -> None:
    """Pay DDP's lazy imports now, on every rank, instead of in a transformation."""
    model = DistributedDataParallel(
        nn.LayerNorm(1), process_group=group.process_group, init_sync=False
    )  # a layer whose weights are not drawn
    model(torch.zeros(1, 1)).sum().backward()


@dataclasses.dataclass
class Replica:
    """What an active rank owns under one plan.

    Attributes:
        plan: The plan in force.
        group: The active group.
        workers: Worker threads, one per stage's device.
        prefix: The frozen layers, or None.
        pipe: The pipeline of the active layers.
        active_model: What DDP wraps.
        last_gradient: When backward has made this replica's last gradient.
        trained: What a training step calls: DDP; for a replica that is alone what DDP
            would wrap, until DDP is asked for. None once retired.
    """

    plan: Plan
    group: ActiveGroup
    workers: Workers
    prefix: FrozenPrefix | None
    pipe: Pipe
    active_model: ActiveModel
    last_gradient: LastGradient
    trained: ActiveModel | DistributedDataParallel | None = None
    _is_checked: bool = False

    def __post_init__(self) -> None:
        """Wrap the model if there are others to reduce with."""
        _require_trainable(self.active_model)
        self.trained = self.active_model
        if self.group.size > 1:
            self.wrapped()

    def wrapped(self) -> DistributedDataParallel:
        """Return what the user sees as ``engine.model``; every step calls it then.

        Raises:
            RuntimeError: the replica was retired.
        """
        if self.trained is None:
            raise RuntimeError("model of a retired replica; please report")
        if not isinstance(self.trained, DistributedDataParallel):
            self.trained = wrap(self.active_model, self.group)
        return self.trained

    @property
    def takes_loss(self) -> bool:
        """Whether the plan's schedule runs forward, loss and backward in turns."""
        plan = self.plan
        lone = plan.num_stages == plan.num_microbatches == 1
        return plan.schedule != "gpipe" and not lone

    def without_reduction(self) -> contextlib.AbstractContextManager[object]:
        """Return the region for a forward and backward whose gradients stay here."""
        if isinstance(self.trained, DistributedDataParallel):
            return self.trained.no_sync()
        return contextlib.nullcontext()

    def await_reduction(self) -> bool:
        """Let the host wait for the gradients; on the host backward has done so.

        Returns:
            Whether there was something to wait for.

        Raises:
            PeerFailure: the all-reduce was given up, or the run has failed: what is
                there must reach no weight.
        """
        there = [device for device in self.pipe.devices if device.type != "cpu"]
        if there:
            wait_for_queued(dict.fromkeys(there))
            self.group.check_ended()
        return bool(there)

    def check_gradients(self) -> None:
        """Refuse a model that DDP would refuse, once: with others it would fail later.

        Raises:
            RuntimeError: backward has given some trainable parameters no gradient.
        """
        if self._is_checked or self.trained is not self.active_model:
            return
        self._is_checked = True
        if any(True for _ in self._without_gradient()):
            raise RuntimeError(self._unused())

    def check_reduced(self) -> None:
        """Refuse a step whose gradients DDP has not reduced.

        It waits for all parameters, and tells of those that were left out at the next
        forward alone, which another plan, or the end, would keep from coming.

        Raises:
            RuntimeError: backward has given some trainable parameters no gradient.
        """
        if not isinstance(self.trained, DistributedDataParallel):
            return
        try:
            self.trained.reducer._check_reducer_finalized()
        except RuntimeError:
            # Not as the cause: what it advises cannot be followed here.
            raise RuntimeError(self._unused()) from None

    def _without_gradient(self) -> Iterator[str]:
        for stage in self.pipe.partitions:
            assert isinstance(stage, PipeSequential)
            for number, layer in enumerate(stage, stage.first_layer):
                for name, parameter in layer.named_parameters():
                    if parameter.requires_grad and parameter.grad is None:
                        yield f"{number}.{name}"

    def _unused(self) -> str:
        """Return the text of the error, which names parameters without a gradient."""
        unused = list(self._without_gradient())
        shown = ", ".join(unused[:5]) or "some that other batches of the step have used"
        return (
            "backward: expected a gradient of every trainable parameter, got none of "
            f"{shown}{', ...' if len(unused) > 5 else ''}; give them "
            "requires_grad=False, or use them in every step: a layer that leaves them "
            "out at times can add 0.0 * parameter.sum() to what it returns; what is to "
            "freeze in the middle of a run, a policy freezes, such as pt.freeze.Manual"
        )

    def retire(self, *, keep_group: bool) -> None:
        """Drop DDP, pipeline and workers; the group too unless it is kept."""
        self.active_model.retire()
        self.last_gradient.forget()
        self.trained = None
        if self.prefix is not None:
            self.prefix.retire()
        self.pipe.close()
        self.workers.close()
        if not keep_group:
            self.group.retire()
