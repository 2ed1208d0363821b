"""After COMMIT: state moves to the members, and what a plan runs on is built."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection

from torch import Tensor, nn

from pipetransformer._extension import hash_bytes
from pipetransformer.autodp import (
    ActiveGroup,
    broadcast_tensors,
    compare_hashes,
    hash_tensors,
)
from pipetransformer.pipe import Pipe, Workers
from pipetransformer.replica.codec_gate import CodecGate
from pipetransformer.replica.draws import DrawPosition
from pipetransformer.replica.frozen_prefix import FrozenPrefix
from pipetransformer.replica.replica import ActiveModel, LastGradient, Replica
from pipetransformer.report import CodecRecord, Phases
from pipetransformer.run.context import Run
from pipetransformer.state.message import decode, encode, named_tensors
from pipetransformer.state.state import (
    extra_states,
    load_extra_states,
    load_optimizer,
    optimizer_tree,
)
from pipetransformer.transformation.proposal import Proposal

_LOG = logging.getLogger(__name__)


def move(
    run: Run,
    group: ActiveGroup,
    source: int,
    receivers: Collection[int],
    phases: Phases,
) -> int:
    """Give `receivers` weights, moments and scheduler of the rank `source`.

    Everything goes over the new group, in place, in the order of names; nothing
    passes through a file. Weights that do not train are compared first, and stay where
    they are if every member has them.

    Args:
        run: The run; its layers are where the new plan wants them.
        group: The new group.
        source: World rank of a member that holds the state.
        receivers: World ranks of the members that do not, equal on every member.
        phases: Told how long sending and comparing took.

    Returns:
        The bytes of the state that was sent; 0 if there are no receivers.

    Raises:
        RuntimeError: members end with different values.
    """
    state, first = run.state, group.members.index(source)
    run.build_optimizer()
    run.restore_optimizer()
    run.placement.settle_moments()
    if group.size == 1 or not receivers:
        return 0
    receives = run.info.rank in receivers
    devices = run.placement.in_use()
    with phases.phase("state"):
        message = b""
        if not receives:
            sent = {**optimizer_tree(state), "extra_state": extra_states(state.model)}
            message, tensors = encode(sent, devices)
        message = group.broadcast_bytes(message, first)
        if receives:
            tree, tensors = decode(message, devices)
        named = state.model_tensors()
        untrained = _untrained(run)
        if untrained and _everybody_has(group, untrained, first):
            named = {name: t for name, t in named.items() if name not in untrained}
        moved = broadcast_tensors(
            group,
            [*named.values(), *tensors],
            source=first,
            bucket_bytes=run.config.autodp.transfer_bucket_bytes,
        )
        if receives:
            load_optimizer(state, tree)
            run.placement.settle_moments()
            state.registered.load(tree.get("registered", {}))
            load_extra_states(state.model, tree["extra_state"])
    with phases.phase("hash"):
        # What the optimizer holds now, not what it was given.
        kept = named_tensors(optimizer_tree(state))
        compare_hashes(group, hash_tensors({**named, **kept}.items()))
    return moved + len(message)


def _untrained(run: Run) -> dict[str, Tensor]:
    """Return the parameters that the user froze, by name."""
    untrained = run.arguments.untrained
    named = run.state.model.named_parameters()
    return {name: p.detach() for name, p in named if p in untrained}


def _everybody_has(group: ActiveGroup, named: dict[str, Tensor], first: int) -> bool:
    """Tell whether all members hold the tensors as member `first` does; collective."""
    hashes = hash_tensors(named.items())
    mine = hash_bytes(json.dumps(hashes, sort_keys=True).encode())
    digests = group.all_gather_bytes(f"{mine:016x}".encode())
    return all(digest == digests[first] for digest in digests)


def rewire(run: Run, group: ActiveGroup, proposal: Proposal) -> Replica:
    """Freeze, cut, and build pipeline and prefix of the new plan, and DDP around it."""
    plan, layers = proposal.plan, list(run.arguments.model)
    run.freezer.apply(plan.boundary)
    devices = run.placement.devices(plan)
    workers = Workers(plan.num_stages, intra_op_threads=run.threads_per_stage)
    prefix = None
    if plan.boundary > 0:
        prefix = FrozenPrefix(
            layers,
            plan.boundary,
            workers,
            run.clock,
            devices=devices,
            places=run.frozen_places(plan) if plan.prefix == "pipelined" else None,
            num_microbatches=plan.num_microbatches,
            fills=plan.prefix == "filled",
            seed=proposal.seed,
            ragged=run.arguments.ragged,
            debug=run.config.cache.debug,
            own_bits=run.config.cache.directory is None,
            admitted=lambda: run.in_force.caches,
            disk_admitted=lambda: run.in_force.uses_disk,
            place=run.placement.place_frozen,
            hold_still=run.freezer.hold_still,
            device_bytes=run.bytes_for_copies(plan),
            sharers=plan.num_replicas,
        )
        if run.inputs.workload is not None and prefix.wants_cache:
            run.caches.obtain(
                "train", run.inputs.workload.num_samples, run.in_force.layout
            )
    pipe = Pipe.from_plan(
        nn.Sequential(*layers[plan.boundary :]),
        cuts=[cut - plan.boundary for cut in plan.cuts],
        num_microbatches=plan.num_microbatches,
        checkpoint=plan.checkpoint,
        devices=devices,
        workers=workers,
        first_layer=plan.boundary,
        seed=proposal.seed,
    )
    each = plan.num_microbatches

    def position(number: int | None) -> DrawPosition:
        # Batches that share an optimizer step follow each other.
        nth = max(0, number - run.state.batch) if number is not None else 0
        return DrawPosition(run.state.step, (nth * group.size + group.rank) * each)

    def position_after(number: int) -> DrawPosition:
        # As `loop.accumulation.window_of` has it: steps end with whole turns.
        if (number + 1) % run.config.accumulation_steps == 0:
            return DrawPosition(run.state.step + 1, group.rank * each)
        return position(number + 1)

    model = ActiveModel(
        pipe,
        prefix,
        cache=run.caches.training,
        position=position,
        write=run.will_read_again,
        gate=_gate(run, layers, plan.boundary),
        clock=run.clock,
        upcoming=lambda: run.upcoming,
        position_after=position_after,
        schedule=plan.schedule,
    )
    run.step_buffers.watch(model)
    run.freezer.assert_consistent()
    return Replica(
        plan=plan,
        group=group,
        workers=workers,
        prefix=prefix,
        pipe=pipe,
        active_model=model,
        last_gradient=LastGradient(layers[plan.boundary :] if group.size > 1 else ()),
    )


def _gate(run: Run, layers: list[nn.Module], boundary: int) -> CodecGate:
    decided = (each for each in run.history.codecs if each.boundary == boundary)

    def tell(record: CodecRecord) -> None:
        run.history.codecs.append(record)
        _LOG.log(logging.INFO if record.passed else logging.WARNING, "%s", record)

    return CodecGate(
        run.config.cache.codec,
        layers[boundary:],
        boundary=boundary,
        loss=run.arguments.loss,
        loss_weight=run.arguments.loss_weight,
        scaled=run.precision.scaled,
        now=lambda: (run.state.epoch, run.state.step),
        tell=tell,
        decided=next(decided, None),
    )
