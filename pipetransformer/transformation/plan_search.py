"""The plans of a run: searched, priced and explained by the run's own options."""

from __future__ import annotations

import dataclasses
import functools

from pipetransformer.autocache import Admission
from pipetransformer.autofreeze import Progress, told
from pipetransformer.explanation import Explanation, explain_plan, explain_run
from pipetransformer.planner import (
    ChangeTerms,
    Cluster,
    InfeasiblePlan,
    Plan,
    Profile,
    SearchOptions,
    Trial,
    corrected,
    least_rows,
    replan,
    search,
    try_out,
    what_would_fit,
)
from pipetransformer.run.arguments import Workload
from pipetransformer.run.context import Run
from pipetransformer.run.measured_costs import PricingInputs
from pipetransformer.transformation.allowed_units import decisions_of
from pipetransformer.transformation.cache_capacity import cluster_at


def first_plan(
    run: Run,
    boundary: int,
    cache_slots: int,
    most: int | None = None,
    *,
    admission: Admission | None = None,
) -> Plan:
    """Search the plan that a run begins with.

    Args:
        run: The run, with profile, cluster and workload known.
        boundary: Index of the first active layer.
        cache_slots: Samples that the slab of a node holds at that boundary.
        most: Bound on R where ranks are missing.
        admission: Why they are read, or not; None: it was not compared.

    Raises:
        InfeasiblePlan: nothing fits; a ValueError that names what is missing.
    """
    profile, cluster, workload = _known(run, boundary, cache_slots, admission)
    options = _options(run, workload, boundary, most, admission)
    find = functools.partial(search, profile, cluster, boundary=boundary)
    factors = _factors(run, options)  # of the run that this one resumes, if it does
    try:
        first = find(options)
    except InfeasiblePlan as error:
        hint = what_would_fit(profile, cluster, options, boundary=boundary)
        raise error.hinting(hint) from None
    return corrected(first, factors, lambda each: find(options.exactly(each)))


def first_trial(run: Run, plan: Plan) -> Trial | None:
    """Return what is tried out at the start of a run, if anything is.

    A run that resumes where plans had been compared does not compare them again: what
    was found counts in its plans, of which there may be others now.

    Args:
        run: The run.
        plan: What it begins with.
    """
    before, asked = run.costs.trial, run.config.plan.trial_steps
    workload, state, each = run.inputs.workload, run.state, run.config
    if before is not None and before.is_over(state.step):
        return dataclasses.replace(before, ended=True)
    if not asked or workload is None:
        return None
    steps = -(-workload.num_batches // each.accumulation_steps)
    if steps < 2:
        return None  # of a pass, whose first one tells nothing
    left = None  # planned before the script says how many epochs there are
    if run.total_epochs:
        done = -(-state.batch // each.accumulation_steps)
        left = max(0, (run.total_epochs - state.epoch) * steps - done)
    return Trial.begin(plan, asked, begun=state.step, total_steps=left)


def next_plan(
    run: Run,
    boundary: int,
    current: Plan,
    pricing: PricingInputs,
    most: int | None = None,
) -> Plan:
    """Plan again at a boundary, and price what would change beyond it.

    Args:
        run: The run, with profile, cluster and workload known.
        boundary: Index of the first active layer from now on.
        current: The plan in force.
        pricing: The lead's, equal on every active rank.
        most: Bound on R where ranks are missing.

    Raises:
        InfeasiblePlan: nothing fits, or the plan in force cannot go on and no other
            can be reached.
    """
    profile, cluster, workload = _known(
        run, boundary, pricing.cache_slots, pricing.admission
    )
    settings, trial = run.config.plan, run.costs.trial
    options = _options(run, workload, boundary, most, pricing.admission)
    terms = ChangeTerms(
        remaining_steps=pricing.remaining_steps,
        pace=pricing.steps.pace,
        pauses=pricing.pauses,
        elapsed_since_last_ns=pricing.elapsed_ns,
        hysteresis=settings.hysteresis,
        reshape=settings.reshape,
        factors=_factors(run, options),
    )
    if trial is not None and not trial.ended:
        plan = try_out(
            profile,
            cluster,
            options,
            terms,
            trial.wanted(run.state.step),
            current=current,
            boundary=boundary,
            rule=trial.rule(run.state.step),
        )
        if plan is not None:
            return plan
    return replan(profile, cluster, options, terms, current=current, boundary=boundary)


def _factors(run: Run, options: SearchOptions) -> dict[str, float]:
    """Return what steps took in a trial over what is simulated of them by now.

    The cluster may have been learned better since, by which a part of what a plan took
    more than another is in the simulation.
    """
    trial = run.costs.trial
    if trial is None or not trial.step_ns:
        return {}
    profile, cluster, _ = _known_now(run, trial.boundary)
    simulated = {}
    for each in trial.candidates:
        narrow = dataclasses.replace(
            options.exactly(each), cache_tiers=options.cache_tiers
        )
        try:
            plan = search(profile, cluster, narrow, boundary=trial.boundary)
        except ValueError:  # it does not fit any more, nor the number of layers
            continue
        simulated[plan.name] = plan.simulated_step_ns
    return trial.factors(simulated)


def fits(run: Run, plan: Plan) -> bool:
    """Tell whether a plan takes no more of a slot than it may."""
    cluster = run.inputs.cluster
    taken = max(plan.bytes_per_stage, default=0)
    return cluster is None or taken <= cluster.device_memory_bytes


def still_fitting(run: Run, current: Plan, most: int | None) -> Plan:
    """Plan at the boundary in force for the ranks and the memory that are left.

    The plan in force stays if it fits; else it keeps K if that does.

    Args:
        run: The run, with profile, cluster and workload known.
        current: The plan in force.
        most: Replicas that there are ranks for; None: as many as it has.

    Raises:
        InfeasiblePlan: nothing fits.
    """
    boundary = current.boundary
    profile, cluster, workload = _known_now(run, boundary)
    if most is None and fits(run, current):
        return current
    options = _options(run, workload, boundary, most, run.in_force.admission)
    kept = current.num_stages
    try:
        return search(profile, cluster, options, boundary=boundary, num_stages=kept)
    except InfeasiblePlan:
        return search(profile, cluster, options, boundary=boundary)


def explain_in_force(run: Run, plan: Plan) -> Explanation:
    """Explain the plan in force by the options it was chosen from.

    Predictions stand alongside what this rank measured; the lead's history is complete.
    """
    boundary, admission = plan.boundary, run.in_force.admission
    profile, cluster, workload = _known_now(run, boundary)
    saved = run.history.freezing
    return explain_plan(
        plan,
        profile,
        cluster,
        measured=explain_run(run.history.to_json()).measured,
        codecs=[str(each) for each in run.history.codecs],
        freezing=[told(decision) for decision in decisions_of(run)],
        saved="" if saved is None else str(saved),
        options=_options(run, workload, boundary, None, admission),
        cache=None
        if admission is None
        else {**admission.to_dict(), "text": admission.text},
        learned=True,
        whole_batches=run.inputs.whole_batches,
    )


def remaining_steps(run: Run) -> int:
    """Return the batches for which a shorter step pays.

    Until the policy changes its answer, if it knows when, else until the end: the
    next freeze makes another plan.
    """
    if run.inputs.workload is None:
        return 0
    state, every = run.state, run.config.freeze_every
    batches = run.inputs.workload.num_batches
    done = state.epoch * batches + state.batch
    left = run.total_epochs * batches - done
    change = run.policy.next_change(progress_of(run, state.decided_epoch))
    if change is not None:
        until = (
            change * batches - done
            if every is None
            else (change * every - state.step) * run.config.accumulation_steps
        )
        left = min(left, until)
    return max(0, left)


def _known_now(run: Run, boundary: int) -> tuple[Profile, Cluster, Workload]:
    held = run.in_force
    return _known(run, boundary, held.cache_slots, held.admission)


def _known(
    run: Run, boundary: int, cache_slots: int, admission: Admission | None
) -> tuple[Profile, Cluster, Workload]:
    inputs = run.inputs
    profile, cluster, workload = inputs.profile, inputs.cluster, inputs.workload
    if profile is None or cluster is None or workload is None:
        raise RuntimeError("plan asked for before the profile; please report")
    now = cluster_at(
        run.costs.steps.applied(cluster), profile, boundary, cache_slots, admission
    )
    return profile, now, workload


def _options(
    run: Run,
    workload: Workload,
    boundary: int,
    most: int | None,
    admission: Admission | None,
) -> SearchOptions:
    settings = run.config.plan
    there, world = len(run.plane.members), run.info.world_size
    bounds = [n for n in (settings.max_replicas, most) if n is not None]
    bounds += [there] if there < world else []  # lost ranks drive nothing
    return SearchOptions(
        global_batch=workload.global_batch,
        num_stages=_forced_stages(run, boundary),
        num_microbatches=1 if run.inputs.whole_batches else settings.num_microbatches,
        max_replicas=1 if world == 1 else min(bounds, default=None),
        min_replicas=2 if run.config.autodp.on_peer_failure == "continue" else 1,
        replicas=settings.replicas,
        cuts=settings.cuts,
        checkpoint=run.config.pipe.checkpoint,
        schedules=_schedules(run),
        prefix_placements=_placements(run),
        cache_tiers=(_tier(run, admission),),
        num_samples=workload.num_samples,
        min_microbatch_samples=max(
            least_rows(layer) for layer in list(run.arguments.model)[boundary:]
        ),
        accumulation_steps=max(
            1, round(workload.batches_per_step(run.config.accumulation_steps))
        ),
    )


def _placements(run: Run) -> tuple[str, ...]:
    """Return where frozen layers may run; slots of a host have the layers in common."""
    asked = run.config.plan.prefix
    if asked == "auto":
        return "replicated", "filled" if run.slots.on_host else "pipelined"
    return (asked,)


def _tier(run: Run, admission: Admission | None) -> str:
    """Return the lowest tier that records are kept in."""
    if not run.config.cache.enabled:
        return "none"
    return "disk" if admission is not None and admission.uses_disk else "host"


def _schedules(run: Run) -> tuple[str, ...]:
    asked = run.config.pipe.schedule
    return ("gpipe", "1f1b", "zb-h1") if asked == "auto" else (asked,)


def _forced_stages(run: Run, boundary: int) -> int | None:
    """Return the forced K, at most the layers that are still active."""
    forced = run.config.plan.num_stages
    if forced is None or boundary == 0:
        return forced
    return min(forced, len(run.arguments.model) - boundary)


def steps_of_pass(run: Run) -> int:
    """Return the optimizer steps of a whole pass; 0 before the samples are known."""
    batches = run.inputs.workload.num_batches if run.inputs.workload is not None else 0
    return -(-batches // run.config.accumulation_steps)


def progress_of(run: Run, point: int) -> Progress:
    """Return where training stands at an evaluation point, as policies receive it."""
    state = run.state
    return Progress(
        epoch=point,
        step=state.step,
        total_steps=steps_of_pass(run) * run.total_epochs or None,
        learning_rate=state.learning_rate,
        metrics=dict(state.metrics),
        evaluations=dict(state.evaluated),
    )
