"""Training state as a small message plus a list of tensors, and back.

A checkpoint has both in one file. The message holds everything that is not a tensor
and a placeholder for each tensor, so it loads with ``weights_only=True``. A new replica
gets the same state over the group, as `state_message` writes it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import inspect
import io
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from pipetransformer.autofreeze import GradientAccumulator, LossSum
from pipetransformer.core import tensor_files as files
from pipetransformer.core.devices import HOST
from pipetransformer.core.wire import printable, shown
from pipetransformer.state.message import stranger, with_numbers
from pipetransformer.state.registered import Registered

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[
    [torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler
]
_LONGEST = 500  # letters of an error that what does not load raised


def make_optimizer(
    factory: OptimizerFactory, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Call the user's factory.

    Raises:
        TypeError: it returns no optimizer, or one whose step needs an argument, as that
            of LBFGS needs a closure: the engine steps once per batch, from gradients.
    """
    built = factory(parameters)
    kind = type(built).__name__
    if not isinstance(built, torch.optim.Optimizer):
        raise TypeError(
            "optimizer: expected a factory returning a torch.optim.Optimizer, "
            f"got {kind}"
        )
    needed = _needed(built.step)
    if needed:
        raise TypeError(
            "optimizer: expected one that steps from gradients alone, such as SGD or "
            f"AdamW, got {kind}, whose step needs {', '.join(needed)}"
        )
    return built


def _let_hooks_be_called(optimizer: torch.optim.Optimizer) -> None:
    """Have the hooks of an optimizer called, where its class is not prepared yet.

    `torch.optim.Optimizer.__init__` does that, which a wrapper of another optimizer may
    leave out. This one alone: others of the class have no hooks. Before a scheduler is
    made: that keeps the step that it finds.
    """
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if not hasattr(optimizer, name):
            setattr(optimizer, name, collections.OrderedDict())
    step = type(optimizer).step
    if not getattr(step, "hooked", False):
        hooked = torch.optim.Optimizer.profile_hook_step(step)
        optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]


def make_scheduler(
    factory: SchedulerFactory, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    """Call the user's factory.

    Raises:
        TypeError: it returns something that cannot be stepped, or whose step needs an
            argument, as that of ReduceLROnPlateau needs a metric.
    """
    built = factory(optimizer)
    needed = _needed(built.step) if hasattr(built, "step") else ["a method step"]
    needed += [
        f"a method {name}"
        for name in ("state_dict", "load_state_dict")
        if not callable(getattr(built, name, None))
    ]
    if needed:
        raise TypeError(
            "lr_scheduler: expected a factory of one that steps without arguments, got "
            f"{type(built).__name__}, which needs {', '.join(needed)}"
        )
    return built


def steps_of(scheduler: torch.optim.lr_scheduler.LRScheduler) -> int:
    """Return how often a scheduler has been stepped.

    Raises:
        TypeError: it does not tell.
    """
    one: Any = scheduler
    while not hasattr(one, "last_epoch") and getattr(one, "_schedulers", None):
        one = one._schedulers[0]  # ChainedScheduler steps all of its own
    steps = getattr(one, "last_epoch", None)
    if not isinstance(steps, int):
        raise TypeError(
            "lr_scheduler: expected an int last_epoch, as torch's schedulers have, for "
            f"Config.scheduler_interval='epoch', got {steps!r} in a "
            f"{type(scheduler).__name__}"
        )
    return steps


def _needed(method: Callable[..., Any]) -> list[str]:
    """Return the arguments that have no default."""
    return [
        entry.name
        for entry in inspect.signature(method).parameters.values()
        if entry.default is entry.empty
        and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
    ]


class Integrity(enum.Enum):
    """Whether others may take the training state of a rank, and save it."""

    OLD = "others have trained since, or nothing was ever given"
    WHOLE = "the latest weights, moments and counters"
    IN_STEP = "an optimizer or a scheduler is changing it"
    RECEIVING = "another rank's is being copied over it"
    AWAITS_PROGRESS = "whole, but what the running pass has counted is still to come"


@dataclasses.dataclass
class TrainingState:
    """The mutable state of a run on one rank.

    Attributes:
        model: The user's whole Sequential.
        optimizer: Built by the user's factory when the rank first becomes active.
        scheduler: Likewise; None when the user gave no factory.
        step: Optimizer steps done.
        epoch: The epoch that runs, or the next one between epochs.
        batch: Batches of the epoch that are done.
        num_batches: Batches of a whole pass; 0 before the first plan.
        pass_nodes: Nodes that own the samples of the pass that runs; 0 before one.
        decided_epoch: The last evaluation point whose freeze decision was taken; its
            number is the epoch unless `Config.freeze_every` is set.
        wanted_units: That decision.
        frozen_units: Units frozen from the front under the plan in force.
        metrics: The last value of each metric, see `note_evaluation`.
        sets: The names of the sets that were evaluated so far.
        evaluated: How many evaluations have had a metric, by its name.
        freezes: The boundary's history: one entry per change, with the epoch and step
            from which on it holds.
        gradients: What the freeze policy looks at; None if it needs none.
        losses: Likewise, of this rank's rows alone.
        scaler: Of the loss under fp16; None otherwise.
        registered: What the user's script has registered.
        integrity: See `Integrity`; only the methods of this class change it.
    """

    model: nn.Sequential
    optimizer: torch.optim.Optimizer | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    step: int = 0
    epoch: int = 0
    batch: int = 0
    num_batches: int = 0
    pass_nodes: int = 0
    decided_epoch: int = -1
    wanted_units: int = 0
    frozen_units: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    sets: list[str] = dataclasses.field(default_factory=list)
    evaluated: dict[str, int] = dataclasses.field(default_factory=dict)
    freezes: list[dict[str, int]] = dataclasses.field(default_factory=list)
    gradients: GradientAccumulator | None = None
    losses: LossSum | None = None
    scaler: torch.amp.GradScaler | None = None
    registered: Registered = dataclasses.field(default_factory=Registered)
    integrity: Integrity = Integrity.OLD
    _in_hand: int | None = None  # the batch that the user's loop was given last
    _stepping: int | None = None  # that which the next optimizer step is with
    _has_gradients: bool = False  # of that one, so that it stays the one
    _untouched: bool = False  # no batch of the pass has been used yet
    _reads_ahead: bool = False  # the loop takes batches before it uses those it has
    _unscaled: bool = False  # the scaler is taking the step
    _depth: int = 0  # of optimizer steps that are parts of one another

    @property
    def learning_rate(self) -> float | None:
        """The first group's; None without one, or where steps find their own."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rate = groups[0].get("lr") if groups else None
        return None if rate is None else float(rate)

    # -- whether it is whole ---------------------------------------------------

    @property
    def holds(self) -> bool:
        """Whether other ranks can go on from here."""
        return self.integrity is Integrity.WHOLE

    @property
    def can_be_saved(self) -> bool:
        """Whether a file of it would be whole; a file has no pass that is running."""
        return self.integrity in (Integrity.WHOLE, Integrity.AWAITS_PROGRESS)

    def become(self, integrity: Integrity) -> None:
        """Note what a change of plan, or a loss of ranks, has made of it."""
        self.integrity = integrity

    def learn_progress(self) -> None:
        """Note that this rank received what the running pass has counted, if it was to.

        Until then it cannot give others the training state.
        """
        if self.integrity is Integrity.AWAITS_PROGRESS:
            self.integrity = Integrity.WHOLE

    @contextlib.contextmanager
    def being_stepped(self) -> Iterator[None]:
        """Within it scheduler or scaler step; it is whole again if that goes well."""
        self.integrity = Integrity.IN_STEP
        yield
        self.integrity = Integrity.WHOLE

    def take_step(self) -> bool:
        """Step the optimizer, and the scaler.

        Returns:
            False if gradients overflowed in fp16: the step counts, but has changed no
            weight.
        """
        if self.optimizer is None:
            raise RuntimeError("step without an optimizer; please report")
        self._depth = 0  # whatever step broke off before
        if self.scaler is None:
            self.optimizer.step()
            return True
        done, scale = self.step, self.scaler.get_scale()
        self._unscaled = True
        try:
            self.scaler.step(self.optimizer)
        finally:
            self._unscaled = False
        with self.being_stepped():
            self.scaler.update()
        if self.step == done:
            self._count_step()
        # Fused optimizers take such a step themselves, and change nothing.
        return self.scaler.get_scale() >= scale

    def schedule_epoch(self) -> None:
        """Take a scheduler that steps with every epoch to the epoch that is reached."""
        scheduler = self.scheduler
        while scheduler is not None and steps_of(scheduler) < self.epoch:
            with self.being_stepped():
                scheduler.step()

    def _before_step(self, *_: object) -> None:
        if self.scaler is not None and not self._unscaled:
            raise RuntimeError(
                "optimizer.step: expected engine.update() with Config.amp='fp16', "
                "whose gradients are scaled, got a call of its own"
            )
        # A checkpoint must not catch weights in the middle of a step.
        self.integrity = Integrity.IN_STEP
        self._depth += 1

    def _after_step(self, *_: object) -> None:
        self._depth -= 1
        if self._depth <= 0:  # else the step of a class that calls its base's
            self._count_step()

    def _count_step(self) -> None:
        self._depth = 0
        self.step += 1
        if self._stepping is not None:  # else the step is of no pass
            # Batches without a step of their own are done with the step that follows.
            self.batch = max(self.batch, self._stepping + 1)
            self._untouched = self._has_gradients = False
        self.integrity = Integrity.WHOLE

    # -- where it is -----------------------------------------------------------

    def hand_out(self, batch: int | None) -> None:
        """Note the batch that the user's loop was given; None between passes.

        It is the one that the next step is with, unless `turn_to` names another.
        """
        if self._in_hand is None or batch is None:
            self._untouched, self._reads_ahead = batch is not None, False
            self._has_gradients = False
        self._in_hand = batch
        if not self._has_gradients:
            self._stepping = batch
        self._depth = 0  # whatever step broke off before

    def turn_to(self, batch: int, *, for_gradients: bool = True) -> bool:
        """Note the batch that the user's loop uses.

        Args:
            batch: Its number.
            for_gradients: The next step is with it, or with a later one that is used.

        Returns:
            Whether the loop reads ahead: it was given a later one, and may step with
            that, too.
        """
        self._untouched = False
        # Another one is an old one, which is used again.
        if self._in_hand is not None and self.batch <= batch <= self._in_hand:
            self._stepping = batch
            self._has_gradients = for_gradients
            self._reads_ahead |= batch < self._in_hand
        return self._reads_ahead

    @property
    def awaits_steps(self) -> bool:
        """Tell whether steps may come with batches that were given before.

        That is so where there are gradients without a step, and where the loop reads
        ahead, which shows once it uses a batch.
        """
        if self._in_hand is None or self.batch > self._in_hand:
            return False
        return self._has_gradients or self._reads_ahead or self._untouched

    def begin_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.batch = epoch, 0

    def note_set(self, name: str) -> None:
        """Note that a set is evaluated."""
        if name not in self.sets:
            self.sets.append(name)

    def told(self, result: Mapping[str, float], name: str) -> dict[str, float]:
        """Return the metrics of a set as records and callbacks have them.

        Where a run evaluates several sets, each metric comes with its set as well,
        ``"test/accuracy"``: without, it is that of the last evaluation.
        """
        several = len(self.sets) > 1
        return {**result, **(_of_set(result, name) if several else {})}

    def note_evaluation(self, result: Mapping[str, float], name: str) -> None:
        """Take in what an evaluation returned, the same on all active ranks.

        Metrics that it does not have stay what they were.
        """
        told = {**result, **_of_set(result, name)}
        self.metrics.update(told)
        for each in told:
            self.evaluated[each] = self.evaluated.get(each, 0) + 1

    def note_boundary(self, boundary: int) -> None:
        """Add to the boundary's history, if it is another one than before."""
        now = {"units": self.frozen_units, "boundary": boundary}
        last = self.freezes[-1] if self.freezes else {}
        if any(last.get(name) != value for name, value in now.items()):
            self.freezes.append({"epoch": self.epoch, "step": self.step, **now})

    def build_optimizer(
        self,
        parameters: list[nn.Parameter],
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
    ) -> None:
        """Call the user's factories once; later calls do nothing.

        The optimizer itself counts the steps, so a loop of the user's own counts too.
        """
        if self.optimizer is not None:
            return
        built = self.optimizer = make_optimizer(optimizer, parameters)
        _let_hooks_be_called(built)
        self.scheduler = make_scheduler(scheduler, built) if scheduler else None
        built.register_step_pre_hook(self._before_step)
        built.register_step_post_hook(self._after_step)

    @property
    def pass_is_done(self) -> bool:
        """Tell whether every batch of the epoch has been trained on."""
        return 0 < self.num_batches <= self.batch

    def progress(self) -> dict[str, int]:
        """Return the counters, for the plan message and the checkpoint.

        A finished pass is the beginning of the next epoch.
        """
        counters = self.counters()
        if self.pass_is_done:
            counters["epoch"], counters["batch"] = self.epoch + 1, 0
        return counters

    def counters(self) -> dict[str, int]:
        """Return the counters as they are: a finished pass is still to be closed."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            "pass_nodes": self.pass_nodes,
            "decided_epoch": self.decided_epoch,
            "wanted_units": self.wanted_units,
            "frozen_units": self.frozen_units,
        }

    def load_progress(self, counters: Mapping[str, int]) -> None:
        """Take over the counters of another rank or of a checkpoint."""
        known = {"pass_nodes": 0, **counters}  # older checkpoints do not tell
        for name in self.counters():
            setattr(self, name, int(known[name]))

    def model_tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, each shared tensor once."""
        named = dict(self.model.named_parameters())
        return {
            **{name: p.detach() for name, p in named.items()},
            **dict(self.model.named_buffers()),
        }


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return what modules keep besides tensors, by name, as torch's hook gives it.

    Those that could not take it back are left out.
    """
    base = nn.Module
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not base.get_extra_state
        and type(module).set_extra_state is not base.set_extra_state
    }


def load_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give modules what `extra_states` returned on another rank."""
    for name, state in states.items():
        model.get_submodule(name).set_extra_state(state)


def _split(tree: Any, tensors: list[Tensor]) -> Any:
    """Replace each tensor of a state dict by a placeholder, in a fixed order."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {
            "__tensor__": len(tensors) - 1,
            "shape": list(tree.shape),
            "dtype": str(tree.dtype).removeprefix("torch."),
        }
    # Exact types: a Counter or OrderedDict is a value, and loads as it is.
    if type(tree) is dict:
        return {key: _split(value, tensors) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_split(value, tensors) for value in tree)
    return tree


def _join(tree: Any, take: Callable[[dict[str, Any]], Tensor]) -> Any:
    if type(tree) is dict:
        if "__tensor__" in tree:
            return take(tree)
        return {key: _join(value, take) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_join(value, take) for value in tree)
    return tree


def _stepping(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> dict[str, Any]:
    """Return the states of both."""
    return {
        "optimizer": with_numbers(optimizer.state_dict()),
        "scheduler": (
            None if scheduler is None else with_numbers(scheduler.state_dict())
        ),
    }


def check_states(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> None:
    """Refuse what neither a new replica nor a checkpoint could give back.

    Raises:
        TypeError: a state holds more than tensors and plain values.
    """
    for name, state in _stepping(optimizer, scheduler).items():
        found = stranger(state)
        if found is not None:
            owner = optimizer if name == "optimizer" else scheduler
            raise TypeError(
                f"{'lr_' if name == 'scheduler' else ''}{name}: expected a state_dict "
                f"of tensors and plain values, got {found} in that of "
                f"{type(owner).__name__}"
            )


def _of_set(result: Mapping[str, float], name: str) -> dict[str, float]:
    return {f"{name}/{metric}": value for metric, value in result.items()}


def optimizer_tree(state: TrainingState) -> dict[str, Any]:
    """Return what new replicas need in addition to the weights.

    That is the state of optimizer and scheduler, what the user's script has registered,
    and what freeze decisions have led to and will look at: the boundary's history, the
    sums of gradients since the last decision, the last metrics, and how many
    evaluations had each. The tensors are the state's own, not copies.
    """
    if state.optimizer is None:
        raise RuntimeError(
            "optimizer state of a rank that never trained; please report"
        )
    tree: dict[str, Any] = {
        **_stepping(state.optimizer, state.scheduler),
        "metrics": dict(state.metrics),
        "sets": list(state.sets),
        "evaluated": dict(state.evaluated),
        "freezes": [dict(entry) for entry in state.freezes],
    }
    if state.gradients is not None:
        tree["gradients"] = state.gradients.state_dict()
    if state.scaler is not None:
        tree["scaler"] = state.scaler.state_dict()
    if state.registered.names:
        tree["registered"] = state.registered.tree()
    return tree


class UnreadableState(TypeError):
    """A state of more than tensors and plain values: nobody could read it back."""


def require_readable(tree: Any) -> None:
    """Refuse a tree that no file could give back.

    Raises:
        UnreadableState: it holds more than tensors and plain values; names the first.
    """
    found = stranger(tree)
    if found is not None:
        raise UnreadableState(
            f"training state: expected tensors and plain values, got {found}"
        )


def require_sendable(state: TrainingState) -> None:
    """Refuse a state that no other rank could be given.

    Raises:
        UnreadableState: `optimizer_tree`, or what a module gives besides its tensors,
            holds more than tensors and plain values.
    """
    if state.optimizer is not None:
        tree = {**optimizer_tree(state), "extra_state": extra_states(state.model)}
        require_readable(_split(tree, []))


def pack_optimizer(state: TrainingState) -> tuple[bytes, list[Tensor]]:
    """Split `optimizer_tree` into a message and tensors, for a file.

    Returns:
        Bytes that load with ``weights_only=True``, and the tensors they refer to, in
        the order of the message, on the host. There they are the optimizer's own, not
        copies.

    Raises:
        UnreadableState: the state holds more than tensors and plain values.
    """
    tensors: list[Tensor] = []
    tree = optimizer_tree(state)
    for name in ("optimizer", "scheduler", "gradients", "registered"):
        if name in tree:
            tree[name] = _split(tree[name], tensors)
    if state.losses is not None:  # of this rank's rows: no other rank adds them too
        tree["losses"] = list(state.losses.own)
    require_readable(tree)
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue(), [tensor.to(HOST) for tensor in tensors]


_SCHEDULED = {"lr", "momentum", "betas"}  # options that schedulers change


def load_optimizer(
    state: TrainingState, joined: Mapping[str, Any], *, observed: bool = True
) -> None:
    """Load a tree as `optimizer_tree` returns it.

    Args:
        state: Its optimizer is built.
        joined: The tree, with tensors that hold the values.
        observed: False: `load_observed` has been called already.
    """
    if state.optimizer is None:
        raise RuntimeError("optimizer not built before its state; please report")
    groups = state.optimizer.param_groups
    begun = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    load_moments(state.optimizer, joined)
    if state.scheduler is not None and joined["scheduler"] is not None:
        state.scheduler.load_state_dict(joined["scheduler"])
    elif state.scheduler is not None:  # it begins anew, and counts on its own rates
        for group, options in zip(state.optimizer.param_groups, begun, strict=True):
            own = ({*options} - {*group}) | _SCHEDULED
            group.update((name, options[name]) for name in own & {*options})
    if state.scaler is not None and "scaler" in joined:  # older checkpoints have none
        state.scaler.load_state_dict(joined["scaler"])
    if observed:
        load_observed(state, joined)


def load_moments(optimizer: torch.optim.Optimizer, joined: Mapping[str, Any]) -> None:
    """Load the optimizer's part of a tree as `optimizer_tree` returns it.

    Raises:
        ValueError: it is that of another kind of optimizer.
    """
    own = {*optimizer.defaults}  # schedulers add theirs
    options = [own & {*group} for group in optimizer.param_groups]
    optimizer.load_state_dict(joined["optimizer"])
    _check_options(optimizer, options)
    _keep_dtypes(optimizer, joined["optimizer"])


def describe_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, Any]:
    """Return what a checkpoint tells of an optimizer, to be compared at a resume.

    Returns:
        ``kind``, the name of its class, and ``groups``, the names of the parameters of
        each group.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        [names.get(id(parameter), "none of the model") for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def _check_options(
    optimizer: torch.optim.Optimizer, before: Sequence[Set[str]]
) -> None:
    """Refuse groups of another kind of optimizer, which torch takes over as they are.

    Args:
        optimizer: It has loaded a state.
        before: Options of each group as the optimizer had built it.

    Raises:
        ValueError: a group has lost an option that every step reads.
    """
    for group, options in zip(optimizer.param_groups, before, strict=False):
        missing = sorted(options - {*group})
        if missing:
            raise ValueError(
                f"param_groups of another optimizer, without {', '.join(missing)}"
            )


def _keep_dtypes(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Put back tensors that `load_state_dict` gave the dtype of their parameter.

    Moments of another dtype than the weights, say of float32 for bfloat16, would lose
    bits, and replicas would differ.
    """
    groups, states = given.get("param_groups"), given.get("state")
    if not isinstance(groups, list) or not isinstance(states, dict):
        return  # a format of the optimizer's own, which it loads by itself
    numbers = [n for group in groups for n in group.get("params", ())]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(numbers) != len(parameters):
        return
    for number, parameter in zip(numbers, parameters, strict=True):
        held, wanted = optimizer.state.get(parameter), states.get(number)
        if not isinstance(held, dict) or not isinstance(wanted, dict):
            continue
        for key, value in wanted.items():
            loaded = held.get(key)
            if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue
            if loaded.dtype != value.dtype:
                held[key] = value.to(loaded.device)


def load_observed(state: TrainingState, joined: Mapping[str, Any]) -> None:
    """Load the boundary's history and what the next freeze decision looks at."""
    state.metrics = dict(joined.get("metrics", {}))  # older checkpoints have none
    state.sets = list(joined.get("sets", []))
    state.evaluated = dict(joined.get("evaluated", {}))
    state.freezes = [dict(entry) for entry in joined.get("freezes", [])]
    if state.gradients is not None and "gradients" in joined:
        state.gradients.load_state_dict(joined["gradients"])


def plain(value: object) -> str:
    """Return a value of a file as errors show it: a short one, or its type."""
    short = isinstance(value, int | float | str)
    return shown(value) if short else f"a {type(value).__name__}"


def unpack_optimizer(message: bytes, tensors: list[Tensor], what: str) -> Any:
    """Join what `pack_optimizer` returned, from a file that may hold anything.

    Args:
        message: Its bytes.
        tensors: Its tensors; they are taken and not copied.
        what: Where they come from, for error texts.

    Raises:
        ValueError: the message is no tree of plain values, or names other tensors.
    """

    def take(spec: dict[str, Any]) -> Tensor:
        number = spec["__tensor__"]
        if type(number) is not int or not 0 <= number < len(tensors):
            raise ValueError(
                f"{what}: expected a number below {len(tensors)} in place of each "
                f"tensor of its optimizer, got {plain(number)}"
            )
        return tensors[number]

    tree = files.unpack(message, f"{what}, state of its optimizer")
    try:
        return _join(tree, take)
    except RecursionError as error:
        raise ValueError(
            f"{what}: expected optimizer state, got a bottomless tree"
        ) from error


def load_optimizer_state(content: dict[str, Any], state: TrainingState) -> None:
    """Copy optimizer, scheduler and registered state into `state`.

    Its optimizer is built.

    Raises:
        ValueError: what the file holds does not load.
    """
    joined = content["joined"]
    with naming(content, f"the state of {type(state.optimizer).__name__}"):
        load_optimizer(state, joined, observed=False)
    load_registered(content, state)


def load_registered(
    content: Mapping[str, Any], state: TrainingState, only: str | None = None
) -> None:
    """Load the states of what is registered.

    Args:
        content: From `read`.
        state: Knows the objects.
        only: The name of one of them; None: all.

    Raises:
        ValueError: what the file holds does not load.
    """
    names = state.registered.names if only is None else [only]
    with naming(content, f"states of {', '.join(names)}"):
        state.registered.load(content["joined"].get("registered", {}), only)


@contextlib.contextmanager
def naming(content: Mapping[str, Any], part: str) -> Iterator[None]:
    """Turn what wrong values of a checkpoint raise into one error that names it.

    Args:
        content: From `read`.
        part: What is loaded.

    Raises:
        ValueError: the body raised any other error than for want of memory.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # values of any kind raise errors of any kind
        raise ValueError(
            f"{content['name']}: expected {part}, got what does not load: "
            f"{type(error).__name__}: {printable(str(error), longest=_LONGEST)}"
        ) from error
