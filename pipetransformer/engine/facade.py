"""The facade: fine-tunes an ``nn.Sequential`` elastically."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.autocache import Ragged
from pipetransformer.autofreeze import Manual, Policy
from pipetransformer.checkpoint import content as persistence
from pipetransformer.checkpoint import format as checkpoint
from pipetransformer.config import Config
from pipetransformer.config.checks import check_count
from pipetransformer.core import tensor_files as files
from pipetransformer.data import Batch
from pipetransformer.data.loading import check_dataset
from pipetransformer.data.own_loader import ShareSampler
from pipetransformer.data.sampler import checked_weights
from pipetransformer.engine.arguments import check_arguments
from pipetransformer.engine.loading import loading_of, workload_of
from pipetransformer.engine.session import Session
from pipetransformer.explanation import Explanation
from pipetransformer.loop import evaluation
from pipetransformer.loop.coordinator import Coordinator
from pipetransformer.loop.microbatches import FixedSet
from pipetransformer.loop.prediction import Prediction, Receivers
from pipetransformer.planner import Plan
from pipetransformer.report import Callback, History
from pipetransformer.run.arguments import AdaptedModel, Loss, LossWeight
from pipetransformer.run.context import Run
from pipetransformer.state.state import OptimizerFactory, SchedulerFactory
from pipetransformer.transformation.plan_search import explain_in_force

_LOG = logging.getLogger(__name__)


class PipeTransformer:
    """Elastic fine-tuning of an ``nn.Sequential``; every rank runs the same script.

    Front layers that the freeze policy names are frozen; the rest is packed into fewer
    devices; freed devices become replicas; frozen activations come from a cache.
    Source: PipeTransformer (ICML 2021).

    Args:
        model: The same Sequential on every rank, on the host. Values are rank 0's.
            Or what ``adapters.from_transformers`` gives.
        optimizer: Factory; gets the trainable parameters in model order. It is also
            called here and before a checkpoint is loaded, on trial; the optimizer must
            step from gradients alone.
        loss: ``loss(outputs, targets)`` -> scalar mean over rows; see
            `Config.check_loss`. None or ``"model"``: the own loss of a model of
            ``from_transformers``, weighted by its own ``loss_weight``.
        loss_weight: ``loss_weight(targets)`` -> how many the loss is a mean of, a
            number or 0-dim tensor, where that is not the rows: tokens that are no
            padding, for example. Gradients and reported losses are then means over
            all of a batch, however it is divided. A share of weight 0 has no loss.
        freeze: The freeze policy. None: ``pt.freeze.Guarded()``, or
            ``pt.freeze.Never()`` where nothing can freeze.
        lr_scheduler: Factory; the scheduler is stepped once per optimizer step, or once
            per epoch with ``Config.scheduler_interval="epoch"``.
        ragged: For rows of different lengths that are padded per batch, such as text:
            what is padding, so that the cache finds a sample whatever it was padded
            with; see `Ragged`. None: what ``from_transformers`` says, else all rows
            have one shape.
        units: Layer index after each freeze unit; by default every layer but the last
            is a unit, or what ``from_transformers`` says.
        config: See `Config`.
        callbacks: Are told of steps, passes, evaluations, changes of plan and losses,
            on the lead; see `pt.report.Callback`.

    Raises:
        TypeError: an argument of the wrong kind; a model that is no Sequential, or
            whose skips do not fit together.
        ValueError: an argument out of range; a model that cannot be trained here.
    """

    def __init__(
        self,
        model: nn.Sequential | AdaptedModel,
        *,
        optimizer: OptimizerFactory,
        loss: Loss | Literal["model"] | None = None,
        loss_weight: LossWeight | None = None,
        freeze: Policy | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        units: Sequence[int] | None = None,
        ragged: Ragged | None = None,
        config: Config | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._arguments = check_arguments(
            model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            loss=loss,
            loss_weight=loss_weight,
            freeze=freeze,
            units=units,
            ragged=ragged,
            config=config,
            callbacks=callbacks,
        )
        self._coordinator: Coordinator | None = None
        self._session: Session | None = None

    # -- opening and closing ---------------------------------------------------

    def __enter__(self) -> PipeTransformer:
        """Connect to the other ranks and compare models and configs.

        Raises:
            ValueError: models, configs or nodes differ between ranks; a variable of the
                launcher, an interface or the checkpoints' folder cannot be used.
            PeerFailure: a rank died, or did not come by ``store_timeout``.
        """
        if self._session is not None:
            raise ValueError("engine: expected one use per engine, got a second with")
        self._session = Session(self._arguments)
        self._coordinator = self._session.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the run on all ranks; on an error, save a checkpoint and tell the peers.

        At a good end the lead saves what no automatic checkpoint has yet.

        Raises:
            PeerFailure: in place of the bare error of a collective that a dead peer
                caused.
        """
        self._coordinator = None
        if self._session is not None:
            self._session.close(error)

    def _open(self) -> Coordinator:
        if self._coordinator is None:
            state = "not open yet" if self._session is None else "closed"
            raise ValueError(
                "engine: expected a call inside its with block, got an engine that is "
                f"{state}"
            )
        return self._coordinator

    # -- the training loop -----------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`; transformations happen here.

        Leave them early on every rank at the same epoch; the end of the ``with`` block
        saves the last step then, see `CheckpointConfig`.

        Args:
            count: Epochs of the whole run; those of a resumed checkpoint, or of a call
                before, are skipped. Where none is left the lead warns.

        Raises:
            PeerFailure: a peer died.
        """
        count = check_count("epochs", count)
        coordinator = self._open()
        coordinator.run.total_epochs = count
        begun = False
        while True:
            coordinator.finish_pass()
            epoch = coordinator.begin_epoch(count)
            if epoch is None:
                if not begun and coordinator.is_lead:
                    _LOG.warning(
                        "epochs(%d): nothing is left to train, %d are done; "
                        "the count is that of the whole run",
                        count,
                        coordinator.run.state.epoch,
                    )
                return
            begun = True
            yield epoch
            coordinator = self._open()
            coordinator.end_epoch(epoch)

    def prepare(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        """Profile the model and put the first plan in force; later calls do nothing.

        `batches` calls it; call it yourself to evaluate before the first pass. The
        lead measures with rows of batches of this set; where samples differ in shape,
        of the batch of median size among a few.

        Args:
            dataset: Map-style training set, or a ``DataLoader``, as for `batches`.
            batch_size: GLOBAL batch size.
            collate_fn: As for `batches`.
            drop_last: Leave out a short last batch.
            weights: As for `batches`.

        Raises:
            InfeasiblePlan: the model does not fit the slots; a ValueError.
            ValueError: no sample, or less than a batch with `drop_last`.
        """
        coordinator = self._open()
        if coordinator.has_plan:
            return
        loading = loading_of(
            self._arguments,
            dataset,
            batch_size,
            collate_fn=collate_fn,
            drop_last=drop_last,
            weights=weights,
        )
        coordinator.first_plan(workload_of(coordinator.run, loading))

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
        weights: Sequence[float] | Tensor | None = None,
    ) -> Iterator[Batch]:
        """Yield this replica's part of each batch of one pass.

        A standby rank gets no batches; its call returns when the pass ends. Leave a
        pass early on every active rank at the same batch.

        Args:
            dataset: Map-style training set with a length. Samples are
                ``(inputs, targets)``, mappings, or whatever `collate_fn` takes;
                optional methods ``inputs(i)``, ``targets(i)``, ``input_key(i, epoch)``
                let cached samples skip loading. Or a ``DataLoader`` of your own with
                a batch sampler of `sampler`, and none of the other arguments; its
                processes are seeded as torch does it. With `CacheConfig.views`
                processes of the engine load with its settings.
            batch_size: GLOBAL batch size, over all replicas.
            collate_fn: As for a ``DataLoader``: a list of samples to ``(inputs,
                targets)`` or, as data collators of transformers do, to a mapping of
                tensors, ``(rows, ...)``. A model of ``from_transformers`` takes its
                inputs and targets from a mapping. Else ``labels``, ``label``,
                ``start_positions``, ``end_positions`` and ``targets`` are targets,
                several as a tuple in this order, and the rest are keywords of the
                first layer.
            num_workers: Loader processes. Their global generators (``random``, torch's,
                numpy's) are seeded for each sample, from `Config.seed`, the epoch and
                the sample's id, so random augmentation is the same under every plan
                and number of processes. With 0, samples draw from this process's
                generators, which nobody seeds unless `CacheConfig.views` is set.
            pin_memory: As for a ``DataLoader``.
            drop_last: Leave out a short last batch.
            weights: Draw as many samples as there are, with replacement, with these
                odds (numbers >= 0, one for each sample), as ``WeightedRandomSampler``
                does; the same weights on every rank and in each pass. Of several nodes
                each draws among its own samples. None: each sample comes once.

        Raises:
            TypeError: an iterable dataset or one without a length; batches that are
                neither pairs nor mappings; arguments besides a ``DataLoader``.
            ValueError: a mapping without targets; a ``DataLoader`` with a sampler that
                replicas cannot divide.
            PeerFailure: a peer died.
        """
        coordinator = self._open()
        loading = loading_of(
            self._arguments,
            dataset,
            batch_size,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            drop_last=drop_last,
            weights=weights,
        )
        coordinator.finish_pass()
        if not coordinator.has_plan:
            coordinator.first_plan(workload_of(coordinator.run, loading))
        yield from coordinator.batches(loading)

    def sampler(
        self,
        dataset: Any,
        batch_size: int,
        *,
        drop_last: bool = False,
        weights: Sequence[float] | Tensor | None = None,
    ) -> ShareSampler:
        """Return a batch sampler for a ``DataLoader`` of your own.

        Give it as ``DataLoader(dataset, batch_sampler=engine.sampler(dataset, 32))``,
        with whatever else the loader takes, and train on ``engine.batches(loader)``.
        It may be made before the ``with`` block.

        Args:
            dataset: Map-style training set with a length.
            batch_size: GLOBAL batch size, over all replicas.
            drop_last: Leave out a short last batch.
            weights: As for `batches`.

        Raises:
            TypeError: an iterable dataset or one without a length.
            ValueError: a batch size below 1; weights that are not one for each sample.
        """
        check_dataset(dataset)
        batch_size = check_count("batch_size", batch_size)
        if weights is not None:
            weights = checked_weights(weights, len(dataset))
        return ShareSampler(
            len(dataset), batch_size, drop_last=drop_last, weights=weights
        )

    def step(self, inputs: Batch | Any, targets: Any = None) -> Tensor:
        """Forward, backward, all-reduce, optimizer and scheduler for one batch.

        With `Config.accumulation_steps` the last batch of each so many ends in the
        step; those before it add their gradients up.

        Args:
            inputs: A batch of `batches`, or this replica's bare inputs, or one mapping
                of inputs and targets as data collators return it.
            targets: With bare inputs: their targets. A step on bare inputs reads no
                cache, and is not taken again when a rank is lost.

        Returns:
            This replica's mean loss, detached, ``()``.

        Raises:
            TypeError: targets beside a batch that has its own.
            FloatingPointError: NaN or Inf in the loss; no weight was changed. Of a lone
                replica on devices that may be the loss of the step before, which has.
            PeerFailure: a peer died.
        """
        coordinator = self._open()
        if isinstance(inputs, Batch):
            if targets is not None and targets is not inputs.targets:
                raise TypeError(
                    "engine.step: expected targets beside bare inputs alone, got them "
                    "beside a batch, which has its own; step(batch.inputs, targets) "
                    "takes others"
                )
        elif isinstance(inputs, Mapping) and targets is None:
            inputs, targets = self._arguments.division.pair(inputs)
        return coordinator.step(inputs, targets)

    def loss(self, batch: Batch) -> Tensor:
        """Run the model and the loss on a batch, for a loop of your own.

        Returns:
            The mean loss over this replica's rows, ``()``; zero, with a graph, on a
            replica that has no rows of a short last batch.

        Raises:
            TypeError: no batch of `batches`.
        """
        coordinator = self._open()
        if not isinstance(batch, Batch):
            raise TypeError(
                "engine.loss: expected a batch of engine.batches, got "
                f"{type(batch).__name__}"
            )
        return coordinator.loss(batch)

    def backward(self, loss: Tensor) -> None:
        """Run backward of a loss of ``engine.model(batch)`` or ``engine.loss(batch)``.

        Weights the loss by this replica's rows, which a bare ``loss.backward()`` does
        not, scales it under ``Config.amp="fp16"``, and counts the batch.
        """
        self._open().backward(loss)

    def update(self) -> None:
        """Clip, step optimizer and scheduler, and clear gradients, as `step` does.

        For a loop of your own, after `backward`; under ``Config.amp="fp16"`` in place
        of ``optimizer.step()``, which would see scaled gradients.

        Raises:
            ValueError: a rank that stands by.
            PeerFailure: a peer died.
        """
        self._open().update()

    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, evaluation.Metric] | None = None,
        *,
        name: str = "eval",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> dict[str, float]:
        """Evaluate exactly: every sample once, the same result on every rank.

        Args:
            dataset: Map-style set, as for `batches`.
            metrics: ``fn(outputs, targets) -> (rows,)`` values of a micro-batch,
                averaged over samples.
            name: Id space of the cache; give each evaluation set its own. Where there
                are several, records and callbacks have each metric by its set, too:
                ``"test/loss"``.
            collate_fn: As for `batches`.
            num_workers: Loader processes of each replica, as for `batches`: seeded for
                each sample, in each evaluation alike.

        Returns:
            ``{"loss": ..., **metrics}``.

        Raises:
            TypeError: metrics that are no functions by name.
            ValueError: a metric called ``"loss"``.
        """
        coordinator = self._open()
        check_dataset(dataset)
        if metrics is not None and not (
            isinstance(metrics, Mapping) and all(map(callable, metrics.values()))
        ):
            raise TypeError(
                "metrics: expected functions by name, {'accuracy': function}, got "
                f"{metrics!r}"
            )
        if metrics and "loss" in metrics:
            raise ValueError(
                "metrics: expected names beside 'loss', which is the loss's, got "
                f"{', '.join(map(repr, metrics))}"
            )
        workers = check_count("num_workers", num_workers, least=0)
        samples = FixedSet(dataset, name, collate_fn, workers)
        return coordinator.evaluate(samples, metrics or {})

    def predict(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        name: str = "predict",
        postprocess: Callable[[Any], Any] | None = None,
        to: Receivers = "lead",
    ) -> Any:
        """Return the model's outputs for each sample once, in the dataset's order.

        Call it on every rank, wherever `evaluate` may be called.

        Args:
            dataset: Map-style set, as for `evaluate`; batches that are mappings need no
                targets.
            collate_fn: As for `batches`.
            num_workers: As for `evaluate`.
            name: Id space of the cache; give each set its own.
            postprocess: Called with the outputs of a micro-batch, where they were
                computed; returns what is to be brought together: a tensor, a list with
                one entry per row, or a tuple or mapping of such. By default the
                outputs themselves.
            to: ``"lead"``, or ``"all"`` active ranks: who gets the result.

        Returns:
            What `postprocess` gives, of all samples: tensors, ``(len(dataset), ...)``
            on the CPU, and lists of ``len(dataset)`` entries. None on ranks that do
            not get it, and on every rank that stands by.

        Raises:
            TypeError: an entry of a list is neither a tensor nor a plain value, nor a
                structure of such.
            ValueError: a tensor or list has not one row or entry per sample, or those
                of micro-batches do not fit together, such as outputs that are padded
                to different lengths; no sample.
            PeerFailure: a peer died.
        """
        coordinator = self._open()
        check_dataset(dataset)
        if to not in ("lead", "all"):
            raise ValueError(f"to: expected 'lead' or 'all', got {to!r}")
        workers = check_count("num_workers", num_workers, least=0)
        samples = FixedSet(dataset, name, collate_fn, workers)
        return coordinator.predict(Prediction(samples, postprocess, to))

    def freeze(self, units: int) -> None:
        """Ask a `Manual` policy for `units` frozen units from its next decision on.

        That is the next epoch, or with `Config.freeze_every` the next step boundary
        that is a multiple of it.

        Raises:
            TypeError: the policy is not `Manual`.
            ValueError: the engine is closed, or the number is out of range.
        """
        coordinator = self._open()
        policy = coordinator.run.policy
        if not isinstance(policy, Manual):
            raise TypeError(
                f"freeze: expected the Manual policy, got {type(policy).__name__}"
            )
        policy.freeze(units)

    def register(self, name: str, registered: Any) -> None:
        """Let an object's state go with the training state.

        It is saved with checkpoints, given to ranks that join, and restored, by the
        object's own ``state_dict()`` and ``load_state_dict()``: an average of the
        weights (``torch.optim.swa_utils.AveragedModel``), counters of your own. Change
        it on every active rank alike, after `step`; with ``accumulation_steps`` as the
        optimizer steps, since batches of a step that was not taken come again. Call
        this on every rank, before the first pass, before or after `load`.

        Args:
            name: Its name in checkpoints; the same names on every rank.
            registered: Its state is made of dicts, lists, tuples, tensors and plain
                values; numpy's scalars become numbers.

        Raises:
            TypeError: no such methods, or a state that holds something else.
            ValueError: a later call, or a name that is taken. Of names that differ
                between ranks, or that a checkpoint lacks, the first pass tells.
        """
        if self._session is None:
            self._arguments.registered.add(name, registered)
        else:
            self._open().register(name, registered)

    # -- checkpoints, and the plain model's weights ----------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint; replica 0 alone writes, no other rank is needed.

        Raises:
            ValueError: no plan has been in force yet, a checkpoint was not loaded
                whole, or the path has no file's name.
            TypeError: a state holds more than tensors and plain values, so that nobody
                could read the file; names its place.
            OSError: the file could not be written; what is there is whole.
            FloatingPointError: the last loss, on a device until now, is NaN or Inf; so
                with all that returns or writes weights.
        """
        coordinator = self._open()
        if coordinator.is_lead:
            persistence.save(coordinator.run, coordinator.replica, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore a checkpoint, before the first pass; under any N, K and R.

        Rank 0 alone reads it, and raises; the others take everything over from it. So
        an error ends the run: what a script did on rank 0 alone the others would not.

        Raises:
            FileNotFoundError: no such file.
            OSError: the file could not be read; names it. MemoryError likewise.
            ValueError: a torn file, wrong values, another model, optimizer or
                scheduler, or a call after the first pass.
        """
        coordinator = self._open()
        if coordinator.has_plan:
            raise ValueError("load: expected a call before the first pass, got a later")
        if coordinator.is_lead:
            persistence.restore(coordinator.run, path, checkpoint.read(path))
        coordinator.run.is_resumed = True

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the plain model's ``state_dict``, on the CPU.

        Names are those of the ``nn.Sequential`` that the engine was made with,
        whatever is frozen and however it is cut. Tied weights are one tensor under
        several names. No other rank is needed. Which ranks
        stand by follows from the plan, so ask on the lead (`is_main`), which is active
        always, and can still ask after a ``with`` block that ended well.

        Raises:
            ValueError: a rank that stands by: its weights are old.
        """
        run = self._ended()
        if run is not None:
            return self._copied_weights(run)
        coordinator = self._open()
        if coordinator.replica is None and not coordinator.is_lead:
            raise ValueError(
                f"state_dict of rank {coordinator.run.info.rank}: expected an active "
                "rank, got a standby, whose weights are old; ask where engine.is_main "
                "is true, or call engine.export(path) on every rank"
            )
        return self._copied_weights(coordinator.run)

    @staticmethod
    def _copied_weights(run: Run) -> dict[str, Any]:
        weights = persistence.weights(run)
        return persistence.each_once(weights, lambda v: v.to("cpu", copy=True))

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the plain model's ``state_dict``; replica 0 alone writes.

        The file loads without this library, into the model that the engine was made
        with: ``model.load_state_dict(torch.load(path, weights_only=True))``.

        Raises:
            ValueError: the path has no file's name.
            OSError: the file could not be written; what is there is whole.
        """
        if self._leads_at_last():
            files.write(path, persistence.weights(self._begun("export")))

    def export_transformers(
        self, folder: str | os.PathLike[str], *, merge: bool = False
    ) -> None:
        """Write config and weights for ``from_pretrained``; replica 0 alone writes.

        No other rank is needed. The folder is made if need be; files of a model that is
        there are replaced one after the other.

        Args:
            folder: For ``config.json`` and ``model.safetensors``; of a model with PEFT
                adapters for ``adapter_config.json`` and ``adapter_model.safetensors``.
            merge: Write a plain model, the adapters added to a copy of its weights;
                the model in training stays as it is.

        Raises:
            ValueError: the engine was not made from a model of ``from_transformers``,
                or there are no adapters to merge.
            OSError: a file could not be written.
        """
        leads, adapted = self._leads_at_last(), self._arguments.adapted
        if adapted is None:
            raise ValueError(
                "export_transformers: expected an engine of what from_transformers "
                "gives, got one of an nn.Sequential; use engine.export"
            )
        if leads:
            self._begun("export_transformers").read_loss()
            adapted.export(folder, merge=merge)

    # -- what is there to see --------------------------------------------------

    @property
    def model(self) -> DistributedDataParallel:
        """The DDP of the current plan; take it anew after each transformation."""
        return self._open().active().wrapped()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; it stays the same object over all transformations.

        Raises:
            ValueError: a call before the first plan, or a rank that has stood by so
                far.
        """
        coordinator = self._open()
        optimizer = coordinator.run.state.optimizer
        if optimizer is None:
            coordinator.require_plan("optimizer")
            raise ValueError("optimizer: expected an active rank, got a standby")
        return optimizer

    @property
    def scheduler(self) -> torch.optim.lr_scheduler.LRScheduler | None:
        """The scheduler, for a loop of your own; `step` steps it otherwise."""
        return self._open().run.state.scheduler

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first pass and on standby ranks.

        After a ``with`` block that ended well the lead can still ask for the last one.
        """
        run = self._ended()
        if run is not None:
            return run.in_force.plan
        replica = self._open().replica
        return replica.plan if replica is not None else None

    def explain(self) -> Explanation:
        """Explain the plan in force: stages, limits, alternatives, price, and the run.

        With it comes what the planner expected of steps and pauses so far, and what
        was measured. ``print(engine.explain())`` shows it, ``.to_dict()`` is for
        programs. Plans a dozen times: it takes as long as some steps do. After a
        ``with`` block that ended well the lead can still ask.

        Raises:
            ValueError: a rank that stands by, or a call before the first plan.
        """
        run = self._ended()
        if run is not None and run.in_force.plan is not None:
            return explain_in_force(run, run.in_force.plan)
        coordinator = self._open()
        return explain_in_force(coordinator.run, coordinator.active().plan)

    @property
    def rank(self) -> int:
        """This process in the control plane."""
        return self._begun("rank").info.rank

    @property
    def is_main(self) -> bool:
        """True on the lead: the first active rank, which writes the files.

        That is rank 0 unless a change of plan had to leave it out.
        """
        return self._begun("is_main").is_lead

    @property
    def history(self) -> History:
        """Records of the run; complete on the lead, see `History`."""
        return self._begun("history").history

    def _leads_at_last(self) -> bool:
        """Tell whether this rank writes what was trained, in the block or behind it.

        Raises:
            ValueError: before the block, or after one that ended with an error.
        """
        session = self._session
        if session is not None and session.ended_well:
            return session.run.is_lead
        return self._open().is_lead

    def _ended(self) -> Run | None:
        """Return the run on the lead after a block that ended well, else None."""
        session = self._session
        over = session is not None and session.ended_well and session.run.is_lead
        return session.run if session is not None and over else None

    def _begun(self, what: str) -> Run:
        if self._session is None:
            raise ValueError(f"{what}: expected an opened engine, got a new one")
        return self._session.run
